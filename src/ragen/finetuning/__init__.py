"""Supervised fine-tuning: demonstrations, transcripts and the preparation of the embedded models.

It may import `evaluation` and the folders below.
"""
