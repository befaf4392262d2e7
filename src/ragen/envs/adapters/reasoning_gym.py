"""The tasks of reasoning-gym: one question, one answer in free text, and the library's own score.

Its datasets make item `i` of seed `s` from the sum ``s + i``. Here, level `l` is an item with the
sum `l`, so every level has an item of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ragen.core.errors import RagenError, nearest
from ragen.core.user_code import UserCodeError, boundary
from ragen.envs.adapters.adapted import Adapted, Played, version_of

SIZE = 500
"""Items of one dataset. Some datasets make all of them at once."""


class ReasoningGymEnv(Adapted):
    """A task of reasoning-gym.

    Observation: the question. Actions: free text, one answer. Reward: the library's score of the
    answer, from 0 to 1; an answer on which its scorer raises has 0. Ends when: the question is
    answered. Success is the score 1. There is no random play.

    Parameters: all parameters of the task's dataset but its seed and size.
    """

    max_turns = actions_per_turn = max_actions = 1

    def __init__(self, **params: Any) -> None:
        if taken := {"seed", "size"} & params.keys():
            raise RagenError(f"{self.name}: {min(taken)} follows from the level")
        self._params = json.dumps(params, sort_keys=True)
        self.goal = f"Answer the question ({self.target})"
        self._rules = (
            "Answer the question. Your answer is scored as it stands, so write nothing but the "
            "answer, in the form that the question asks for."
        )
        _dataset(self.target, self._params, 0)  # which refuses wrong parameters

    @classmethod
    def find(cls, target: str) -> tuple[str, ...]:
        import reasoning_gym

        known = set(reasoning_gym.factory.DATASETS) - {"composite"}
        if target not in known:
            raise RagenError(f"reasoning-gym has no task {target!r}{nearest(target, known)}")
        return (version_of("reasoning_gym"),)

    def begin(self, level_seed: int, noise_seed: int) -> str:
        index = level_seed % SIZE
        self._dataset = _dataset(self.target, self._params, level_seed - index)
        self._item: Mapping[str, Any] = self._dataset[index]
        return str(self._item["question"])

    def play(self, action: str) -> Played:
        try:
            with boundary("score_answer"):
                score = float(self._dataset.score_answer(action, self._item))
        except UserCodeError:  # most scorers expect an answer of the right form
            score = 0.0
        return Played(f"Your answer has the score {score:g}.", score, True, False, score >= 1)


@lru_cache(maxsize=16)
def _dataset(task: str, params: str, seed: int) -> Any:
    """A dataset, which all environments of the task share: some take seconds to be made."""
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=SIZE, **json.loads(params))
    except (TypeError, AssertionError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise RagenError(f"reasoning-gym:{task} refuses its parameters: {said}") from None
