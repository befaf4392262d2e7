"""Supervised fine-tuning on demonstrations or transcripts.

It may import `bases` and the folders below.
"""
