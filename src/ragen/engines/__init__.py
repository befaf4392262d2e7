"""Where a policy samples and learns.

The engine, samplers, the learner, checkpoints, exactness checks and the memory plan. It may import
`rollout` and the folders below.
"""
