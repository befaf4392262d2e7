"""Environments.

The contract, the registry, the conformance checker, isolation in a worker process, and one file for
each environment. It may import `storage` and the folders below and loads no torch.
"""
