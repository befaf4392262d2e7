"""Every setting of a run.

The sections with their defaults, the rules between them, and the reading of presets, recipes and
command-line values. It may import `core` and loads no torch.
"""
