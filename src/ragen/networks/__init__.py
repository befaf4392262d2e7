"""How a model is computed.

Architectures' fast paths, packed rows, decoding, LoRA, precision, shards, the device. It may import
`envs` and the folders below. torch starts here.
"""
