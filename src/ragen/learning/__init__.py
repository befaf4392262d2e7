"""How weights change: the learner, its optimizers, its checks of exactness, its checkpoints.

It may import `sampling` and the folders below.
"""
