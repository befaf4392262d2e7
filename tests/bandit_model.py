"""A tiny model that plays Bandit: it replies in the required format with either arm.

RAGEN trains it on scripted episodes in two seconds, once per run of the suite, so that runs in
tests have different rewards and gradients other than zero.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

from tests.shared import once
from tests.tiny import tiny_model, tiny_tokenizer

SETTINGS: dict[str, Any] = {
    "steps": 3,
    "threads": 1,
    "prompt.style": "compact",
    "prompt.think": False,
    "rollout.num_groups": 2,
    "rollout.group_size": 4,
    "rollout.max_tokens": 10,
    "rollout.slots": 8,
    "model.max_length": 128,
    "update.lr": 1e-3,
    "update.minibatch_episodes": 4,
    "eval.episodes": 4,
    "checkpoint.every": 1,
    "record.tokens_every": 1,
}
"""Settings of a run of about one second: `merge("bandit", settings(…))`."""


def settings(**more: Any) -> dict[str, Any]:
    """`SETTINGS` with the model's folder and `more` settings (double underscores for dots)."""
    return (
        SETTINGS
        | {"model.path": str(bandit_model())}
        | {key.replace("__", "."): value for key, value in more.items()}
    )


@cache
def bandit_model() -> Path:
    """The folder of the model."""
    return once("bandit-model", _prepare)


def _prepare(folder: Path) -> None:
    import torch

    from ragen.algorithms.batch import collate
    from ragen.algorithms.samples import to_samples
    from ragen.chat.chat import Chat
    from ragen.config.reading import merge
    from ragen.config.sections import LossConfig, UpdateConfig
    from ragen.core.stopping import run_async
    from ragen.learning.learner import Learner
    from ragen.learning.models import Models
    from ragen.models.loading import save_model
    from ragen.rollout.groups import run_groups
    from ragen.rollout.setup import make_setup
    from tests.scripted_policy import ScriptedPolicy

    torch.set_num_threads(1)
    tokenizer = tiny_tokenizer("chatml")
    model = tiny_model(tokenizer)
    chat = Chat(tokenizer, think=False)
    config = merge("bandit", SETTINGS)
    generator = random.Random(0)
    (end,) = chat.end_ids - {tokenizer.eos_token_id}
    policy = ScriptedPolicy(
        lambda prompt: f"{generator.choice(['Dragon', 'Phoenix'])}</answer>",
        lambda text: (*chat.encode(text), end),
    )
    what = policy, make_setup(config, chat), range(4), 4, (0, "speak")
    groups = run_async(run_groups(*what))
    learner = Learner(Models(model), UpdateConfig(lr=1e-2), LossConfig(name="nll"), steps=80)
    batch = collate(to_samples(groups)[0])
    for step in range(80):
        learner.update(batch, step)
    save_model(model, tokenizer, folder)
