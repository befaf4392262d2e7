"""Where the value of a key comes from: recipe, environment, model, a stored run, the user.

It may import `rollout` and the folders below and loads no torch.
"""
