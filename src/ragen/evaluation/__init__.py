"""How good an agent is: targets, baselines, outcomes, success with intervals, and comparisons.

It may import `diagnostics` and the folders below and loads no torch until a model is needed.
"""
