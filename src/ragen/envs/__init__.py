"""Environments.

The contract, the registry, the conformance checker and isolation in a worker process; RAGEN's own
environments in `worlds`, those of other libraries in `adapters`. It may import `storage` and the
folders below and loads no torch.
"""
