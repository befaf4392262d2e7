"""How episodes are produced.

Set-ups, policies, players, endpoints, judges, reward terms, and the play of one episode. It may
import `chat` and the folders below and loads no torch.
"""
