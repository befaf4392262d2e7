"""How a model is computed: fast paths, packed rows, decoding, LoRA, precision, shards, device.

It may import `envs` and the folders below. torch starts here.
"""
