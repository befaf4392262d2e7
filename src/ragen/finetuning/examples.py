"""The examples of supervised fine-tuning: episodes of a player or a model, or conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np

from ragen.algorithms.batch import Batch, collate
from ragen.algorithms.samples import Exchange, join
from ragen.bases.curriculum import TEACHERS
from ragen.bases.demonstrations import (
    Demonstrator,
    mask_untrained,
    neutral_thought,
    plan_in_words,
)
from ragen.chat.chat import Chat
from ragen.chat.prompt import prefill
from ragen.config.config import Config
from ragen.config.sections import PromptConfig
from ragen.core.errors import RagenError
from ragen.core.seeding import SFT_LEVELS
from ragen.core.stopping import run_async
from ragen.core.types import Group
from ragen.evaluation.outcomes import outcome_of, refuse_unplayable
from ragen.evaluation.targets import load_target, refuse_absent
from ragen.finetuning.descriptions import wanderer
from ragen.finetuning.transcripts import OWN_PLAYERS, Transcript, to_exchanges
from ragen.rollout.groups import run_groups
from ragen.rollout.players import PlayerPolicy, random_player, solver
from ragen.rollout.policies import Closable, Policy
from ragen.rollout.setup import Setup, make_setup

HELD_OUT = 0.1
"""Share of the examples that are held out to measure the loss."""

Keep = Literal["solved", "all"]

UNSKILLED = {
    "random": "lean to no action",
    "wanderer": "describe the map and then name a move, a word that is not trained",
}
"""Random players, and what their thoughts do."""

Example = list[Exchange]
"""The prompts and completions of an episode or a conversation."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Training examples, and the numbers of those that are left out.

    `unsolved` counts the episodes that failed or, where only solved ones are kept, had no success.
    `too_long` counts the examples that do not fit into a rollout. `shows` says in a sentence what
    there is to learn from the examples. `trained` is `Demonstrator.trained`; without it, all tokens
    of the replies are trained.
    """

    source: str
    shows: str
    kept: list[Example]
    unsolved: int = 0
    too_long: int = 0
    trained: Mapping[int, Sequence[bool]] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{len(self.kept)} {self.source} (left out: {self.unsolved} unsolved, "
            f"{self.too_long} too long)"
        )

    def fitting(self, max_tokens: int, max_length: int) -> Examples:
        """Those whose replies have at most `max_tokens` tokens, and `max_length` with the prompt.

        Raises:
            RagenError: There are fewer than two.
        """

        def fits(exchange: Exchange) -> bool:
            prompt, completion = (len(part.token_ids or ()) for part in exchange)
            return completion <= max_tokens and prompt + completion <= max_length

        kept = [example for example in self.kept if example and all(map(fits, example))]
        found = replace(self, kept=kept, too_long=len(self.kept) - len(kept))
        if len(kept) < 2:
            raise RagenError(
                f"{found}; at least two are needed, one of them held out: give more, or raise "
                "rollout.max_tokens, model.max_length, env.max_turns or env.max_actions"
            )
        return found

    def split(self, seed: int) -> tuple[list[Example], list[Example]]:
        """The training examples and the held-out share, at least one of each."""
        order = np.random.Generator(np.random.PCG64(seed)).permutation(len(self.kept)).tolist()
        held_out = set(order[: max(1, round(HELD_OUT * len(self.kept)))])
        training = [example for i, example in enumerate(self.kept) if i not in held_out]
        return training, [self.kept[i] for i in sorted(held_out)]

    def batch(self, some: Sequence[Example]) -> Batch:
        """One batch of some of the examples; each is one episode and one group."""
        samples = [sample for i, each in enumerate(some) for sample in join(each, i, i)]
        if self.trained:
            prompts = [[prompt for prompt, _ in example] for example in some]
            samples = mask_untrained(samples, prompts, self.trained)
        return collate(samples)


def find_player(config: Config, chat: Chat, player: str) -> tuple[Policy | PlayerPolicy, Setup]:
    """The player of a name, a run or a model, and the set-up of its episodes.

    Raises:
        RagenError: There is none, or it cannot play this environment with these prompts.
    """
    if player not in OWN_PLAYERS:
        refuse_absent(player, words=", ".join((*OWN_PLAYERS, "a FILE.jsonl")))
        return load_target(player, config)
    setup = make_setup(config, chat)
    if player in ("random", "solver"):
        instead = "give conversations to learn from with --player FILE.jsonl"
        is_random = player == "random"
        policy = PlayerPolicy(
            random_player if is_random else lambda _: partial(solver, instead=instead),
            setup.think,
            setup.prefill,
            lambda text: (*chat.encode_text(text), chat.end),
            neutral_thought if is_random else plan_in_words,
            setup.write,
        )
        return policy, setup
    if setup.prefill.strip() != "<think>":
        raise RagenError(
            f"the reply of a {player} begins after a pre-filled <think>: set prompt.think = true "
            "and prompt.prefill = true, or take --player solver"
        )
    if player == "wanderer":
        return Demonstrator(wanderer, chat), setup
    if setup.env not in TEACHERS:
        raise RagenError(
            f"there is no teacher for {setup.env}, only for {', '.join(TEACHERS)}: "
            "take --player solver"
        )
    return Demonstrator(TEACHERS[setup.env], chat), setup


def played_examples(
    policy: Policy | PlayerPolicy,
    setup: Setup,
    chat: Chat,
    player: str,
    episodes: int,
    keep: Keep | None,
    seed: int,
) -> Examples:
    """Episodes of a player at temperature 1, for a model with this `chat`.

    By default, all episodes of the players in `UNSKILLED` are kept, and of others the solved ones.

    Raises:
        RagenError: The environment fails in every episode, or another model wrote the tokens.
    """
    keep = keep or ("all" if player in UNSKILLED else "solved")
    played = [group.episodes[0] for group in _play(policy, setup, episodes, seed)]
    refuse_unplayable([outcome_of(episode) for episode in played])
    kept = [each for each in played if (each.success or keep == "all") and not each.failed]
    examples = [[(turn.prompt, turn.completion) for turn in episode.turns] for episode in kept]
    for example in filter(None, examples):  # without a turn, the first prompt left no room
        first, _ = example[0]
        texts = all(chat.decode(reply.token_ids or ()) == reply.text for _, reply in example)
        if not texts or chat.open(first.messages, setup.prefill)[0] != first.token_ids:
            raise RagenError(
                f"the tokens of {player} are not those of the model: give its episodes as "
                "conversations, --player FILE.jsonl"
            )
    of_all = "All episodes, successes and failures," if keep == "all" else "Only successes"
    shows = f"{of_all} of {player} play in {setup.env} were kept."
    if keep == "all" and player in UNSKILLED:
        shows += (
            f" It is random play, with thoughts that {UNSKILLED[player]}: it shows the form of a "
            "reply and legal actions, and no skill."
        )
    unsolved = len(played) - len(kept)
    trained = policy.trained if isinstance(policy, Demonstrator) else {}
    return Examples(f"{player} episodes", shows, examples, unsolved, trained=trained)


def _play(policy: Policy | PlayerPolicy, setup: Setup, episodes: int, seed: int) -> list[Group]:
    """Play without the reward terms and the temperature of a run, and release the policy."""
    setup = replace(setup, temperature=1.0, reward_terms={})
    levels = range(SFT_LEVELS, SFT_LEVELS + episodes)

    async def play() -> list[Group]:
        try:
            return await run_groups(policy, setup, levels, 1, (seed, "sft"))
        finally:
            if isinstance(policy, Closable):  # a sampler's memory is needed for training
                await policy.close()

    with closing(setup):
        return run_async(play())


def transcript_examples(
    transcripts: Sequence[Transcript], chat: Chat, prompt: PromptConfig
) -> Examples:
    """Conversations from a file, as the model's chat renders them."""
    given = prefill(prompt.think) if prompt.prefill else ""
    drops = prompt.think and prompt.history_thoughts == "drop"
    examples = [to_exchanges(each, chat, given, drops) for each in transcripts]
    return Examples("conversations", "They are conversations from a file.", examples)
