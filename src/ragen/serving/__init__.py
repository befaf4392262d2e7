"""Web servers: the limits of connections, access control, and environments in OpenEnv's protocol.

It may import `studies` and the folders below and loads no torch.
"""
