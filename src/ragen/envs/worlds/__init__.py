"""RAGEN's own environments, one file for each.

It may import the contract and the folders below and loads no torch.
"""
