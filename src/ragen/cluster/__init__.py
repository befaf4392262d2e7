"""A run on several processes and machines: Ray's engine, its members, and their loss.

It may import `engines` and the folders below.
"""
