"""The run's database and the files beside it: schema, writing, reading and export of episodes.

It may import `config` and `core` and loads no torch.
"""
