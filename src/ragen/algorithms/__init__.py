"""The mathematics between an episode and a gradient.

Samples, batches, rewards, advantages, credit, losses and filters, as pure functions. It may import
`models` and the folders below.
"""
