"""How episodes are produced.

Chat templates, prompts, the parser, policies, players, reward terms, and the play of one episode.
It may import `algorithms` and the folders below and loads no torch.
"""
