"""Seeds: each is derived from the run's seed and a path; nothing uses global random state."""

import hashlib

EVAL_LEVELS = 123
TRAIN_LEVELS = 10_000
REFILL_LEVELS = 2**30
BASE_LEVELS = 2**31
SFT_LEVELS = 2**31 + 2**30
"""The first level seeds of evaluations, of training groups (`train_level`) and their replacements
(`refill_level`), and of demonstrations for base preparation and for supervised fine-tuning."""

MAX_REFILLS = 3
"""Maximum number of rounds of refilling per step (`rollout.refill`)."""


def derive(run_seed: int, *path: int | str) -> int:
    """A seed in [0, 2⁶³) for one purpose, the same on every machine and in every process.

    It is BLAKE2b of `run_seed` and `path`. The path names the purpose, such as
    ``"noise", step, group, member``; different paths give independent seeds.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (run_seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def train_level(number: int, num_levels: int = 0) -> int:
    """Level seed of the `number`-th training group of a run, from 0.

    The groups take turns on `num_levels` levels; 0 gives each group its own level.
    """
    return TRAIN_LEVELS + (number % num_levels if num_levels else number)


def refill_level(step: int, index: int, num_groups: int) -> int:
    """Level seed of the `index`-th group that replaces another in a step (`rollout.refill`).

    These levels have their own range, so a step's first groups are the same with and without
    refilling. A step replaces at most `MAX_REFILLS` times its number of groups.
    """
    return REFILL_LEVELS + step * MAX_REFILLS * num_groups + index
