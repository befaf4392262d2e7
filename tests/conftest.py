"""How the whole suite runs: the same examples each time, no deadline for a busy machine to miss."""

from hypothesis import settings

settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")
