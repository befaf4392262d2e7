"""Web servers: a server, access control, and environments in OpenEnv's protocol.

It may import `studies` and the folders below and loads no torch.
"""
