"""How the small models that runs begin with are prepared: demonstrations, curricula, tokenizers.

It may import `evaluation` and the folders below.
"""
