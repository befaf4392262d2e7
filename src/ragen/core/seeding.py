"""Randomness is derived, never ambient: a seed follows from the run's seed and a path."""

import hashlib

TRAIN_LEVELS = 10_000
EVAL_LEVELS = 123
REFILL_LEVELS = 2**30
BASE_LEVELS = 2**31
SFT_LEVELS = 2**31 + 2**30

MAX_REFILLS = 3
"""Rounds of refilling that a step may have (`rollout.refill`)."""


def derive(run_seed: int, *path: int | str) -> int:
    """A 63-bit seed for one purpose, the same on every machine and in every process.

    Args:
        run_seed: The run's seed.
        *path: What the seed is for, such as ``"noise", step, group, member``.

    Returns:
        An integer in [0, 2⁶³), from BLAKE2b of the path. Different paths give independent seeds.

    Example:
        >>> derive(0, "noise", 1, 2, 3) == derive(0, "noise", 1, 2, 3)
        True
        >>> derive(0, "noise", 12, 3) == derive(0, "noise", 1, 23)
        False
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (run_seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def train_level(step: int, group: int, num_prompts: int) -> int:
    """Level seed of a training group; `step` and `group` count from 0, so no level comes twice.

    Example:
        >>> train_level(2, 3, 8)
        10019
    """
    return TRAIN_LEVELS + step * num_prompts + group


def refill_level(step: int, index: int, num_prompts: int) -> int:
    """Level seed of the `index`-th group that replaces another in a step (`rollout.refill`).

    In a range of its own, so that a run plays the same first groups whether it refills or not. A
    step replaces `MAX_REFILLS` times its prompts at most.

    Example:
        >>> refill_level(2, 3, 8) - 2**30  # 2 · 3 · 8 + 3
        51
    """
    return REFILL_LEVELS + step * MAX_REFILLS * num_prompts + index


def eval_level(index: int, first: int = EVAL_LEVELS) -> int:
    """Level seed of an evaluation episode: a fixed set that counts up from 123.

    Example:
        >>> eval_level(0), eval_level(255)
        (123, 378)
    """
    return first + index


def base_level(index: int) -> int:
    """Level seed of a demonstration for base preparation: far above any training level.

    Example:
        >>> base_level(5) - 2**31
        5
    """
    return BASE_LEVELS + index


def sft_level(index: int) -> int:
    """Level seed of a demonstration for supervised fine-tuning: above those of base preparation.

    Example:
        >>> sft_level(5) - 2**31 - 2**30
        5
    """
    return SFT_LEVELS + index
