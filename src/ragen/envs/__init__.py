"""Environments: the contract, the registry, the conformance checker and worker processes.

RAGEN's own environments are in `worlds`, those of other libraries in `adapters`. It may import
`storage` and the folders below and loads no torch.
"""
