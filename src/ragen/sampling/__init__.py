"""How completions are drawn: the local sampler, vLLM, servers, and the weights that they load.

It may import `settings` and the folders below.
"""
