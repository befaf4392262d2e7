"""`ragen serve`: environments in OpenEnv's protocol.

It may import `studies` and the folders below and loads no torch.
"""
