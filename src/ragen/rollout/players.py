"""Players choose a turn's actions from the environment itself: random, solver and human play."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ragen.chat.prompt import Limits
from ragen.core.errors import RagenError
from ragen.core.types import Completion, Prompt
from ragen.core.user_code import boundary
from ragen.envs import answers
from ragen.envs.contract import Env, pick
from ragen.rollout.policies import written_completion

Player = Callable[[Env, int, int, int], list[str]]
"""Chooses the actions of a turn, in order: at least one, and as many as the budgets allow.

The numbers are the turns left (this one included), the actions left, and the actions per turn. A
player must not change the environment.
"""


def random_player(seed: int) -> Player:
    """Random play: uniformly random valid actions, as many as the budgets allow.

    Where the environment takes free text, its `Env.random_action` writes one action. Without that
    the player raises `RagenError`.
    """
    generator = np.random.Generator(np.random.PCG64(seed))

    def play(env: Env, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str]:
        names = _actions_of(env)
        if names is not None:
            count = min(actions_left, actions_per_turn)
            return [pick(generator, names) for _ in range(count)]
        with boundary("random_action"):
            action = env.random_action(generator)
            if action is not None:
                return [answers.text(action, "random_action", "an action")]
        raise RagenError(
            f"{env.name} takes free text and has no random player: give it a random_action "
            "(docs/environments.md)"
        )

    return play


def has_random_play(env: Env) -> bool:
    """True if there is random play: of named actions, or by `random_action`."""
    with boundary("random_action"):
        generator = np.random.Generator(np.random.PCG64(0))
        return env.actions is not None or env.random_action(generator) is not None


def _actions_of(env: Env) -> tuple[str, ...] | None:
    with boundary("actions"):
        return answers.action_names(env.actions, "actions")


def solver(
    env: Env,
    turns_left: int,
    actions_left: int,
    actions_per_turn: int,
    instead: str = "play it with random, human or a model",
) -> list[str]:
    """Optimal play, by the environment's own solver (`Env.solve`)."""
    with boundary("solve"):
        answer = env.solve(turns_left, actions_left, actions_per_turn)
        actions = answers.action_names(answer, "solve")
    if actions is None:
        raise RagenError(f"{env.name} has no solver; {instead}")
    return list(actions)


def human(
    env: Env,
    turns_left: int,
    actions_left: int,
    actions_per_turn: int,
    ask: Callable[[str], str] = input,
) -> list[str]:
    """A person who types action names or prefixes, separated by spaces, commas or ``||``.

    `ask` shows a text and returns the typed line; the person is asked until the line is valid. If
    actions are free text, the line is the action.
    """
    names = _actions_of(env)
    if names is None:
        return [ask("> ")]
    limit = min(actions_left, actions_per_turn)
    question = f"{' '.join(names)} (up to {limit}) > "
    while True:
        try:
            return read_actions(ask(question), names, limit)
        except ValueError as problem:
            question = f"{problem} > "


def read_actions(line: str, names: tuple[str, ...], limit: int) -> list[str]:
    """Action names in a typed line, which may be one name of several words."""
    whole = [name for name in names if name.lower() == line.strip().lower()]
    words = line.replace("||", " ").replace(",", " ").split()
    actions = whole or [_read_action(word.lower(), names) for word in words]
    if not 0 < len(actions) <= limit:
        raise ValueError(f"type 1 to {limit} of: {' '.join(names)}")
    return actions


def _read_action(word: str, names: tuple[str, ...]) -> str:
    same = [name for name in names if name.lower() == word]
    matches = same or [name for name in names if name.lower().startswith(word)]
    if len(matches) != 1:
        what = "could be " + " or ".join(matches) if matches else "is none of " + " ".join(names)
        raise ValueError(f"{word!r} {what}")
    return matches[0]


class PlayerPolicy:
    """A player that writes its actions as a reply, so that it can be used as a policy.

    `make` makes the player of a turn from the seed of its prompt, so that an episode does not
    depend on those before it. `prefill` is the start of the reply that the prompt has already.
    `encode` turns text into token ids with the end-of-turn token; ``None`` gives text only.
    `thought` writes the thought from the actions and the seed, `write` the actions (`Setup.write`).
    """

    def __init__(
        self,
        make: Callable[[int], Player],
        think: bool = True,
        prefill: str = "",
        encode: Callable[[str], tuple[int, ...]] | None = None,
        thought: Callable[[Sequence[str], int], str] = lambda actions, seed: "",
        write: Callable[[Sequence[str]], str] = lambda actions: (
            f"<answer>{' || '.join(actions)}</answer>"
        ),
    ) -> None:
        self._make, self._thought = make, thought
        self._think, self._prefill, self._encode = think, prefill, encode
        self._write = write

    def act(self, env: Env, limits: Limits, prompt: Prompt) -> Completion:
        """The player's turn as a completion."""
        play = self._make(prompt.seed)
        actions = play(env, limits.turns_left, limits.actions_left, limits.actions_per_turn)
        thought = f"<think>{self._thought(actions, prompt.seed)}</think>" if self._think else ""
        reply = f"{thought}{self._write(actions)}"
        # A template may write white space after the tag that opens the thought.
        return written_completion(reply.removeprefix(self._prefill.rstrip()), self._encode)

    def sum_up(self, env: Env, prompt: Prompt) -> Completion:
        """The player's summary of its turns: none, which is rejected."""
        return written_completion("", self._encode)


PLAYERS: dict[str, Callable[[int], Player]] = {
    "random": random_player,
    "solver": lambda seed: solver,
    "human": lambda seed: human,
}
"""Players by name; the function makes one from a seed."""
