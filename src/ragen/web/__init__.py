"""Web servers: one of an application, and who may make requests.

It may import `storage` and the folders below and loads no torch.
"""
