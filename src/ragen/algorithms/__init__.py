"""The mathematics from episodes to a gradient.

Samples, batches, credit, advantages, losses and filters, as pure functions. It may import
`models` and the folders below.
"""
