"""The training loop and what surrounds it.

The run's state, the collection of one step, recovery, progress and trackers. It may import
`finetuning` and the folders below.
"""
