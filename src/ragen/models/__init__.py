"""Weights: names, the Hub, files, loading, adapters on disk, and the plan of memory.

It may import `networks` and the folders below.
"""
