"""The gateway: agents of any library call the policy here, and every sampled token is kept.

It may import `chat` and the folders below and loads no torch.
"""
