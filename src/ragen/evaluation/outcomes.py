"""Outcomes of evaluated episodes, and what all of them failing means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ragen.config.rules import TEMPERATURES, vllm_refuses
from ragen.core.errors import RagenError, UnplayableError, last_line
from ragen.core.types import Episode, StopReason, Turn, Usage


def how_sampled(temperature: float) -> str:
    """How tokens were chosen: ``greedy``, or by sampling at a temperature, such as ``T=0.7``."""
    return "greedy" if temperature == 0 else f"T={temperature:g}"


def phase_of(temperature: float) -> str:
    """The phase of the episodes that a run's own evaluations record."""
    return "eval" if temperature else "eval greedy"


def check_sampling(seed: int, temperature: float, sampler: str) -> None:
    """Refuse a seed or a temperature with which nothing can be sampled."""
    low, high = TEMPERATURES
    if temperature != 0 and not low <= temperature <= high:
        raise RagenError(
            f"temperature = {temperature:g}: expected {low:g} to {high:g}, or 0 for greedy play"
        )
    if seed < 0:
        raise RagenError(f"seed = {seed}: expected a whole number ≥ 0")
    if sampler == "vllm" and (reason := vllm_refuses(temperature)):
        raise RagenError(f"temperature = {temperature:g}: {reason}, or greedily at 0")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One evaluated episode in numbers.

    `sample` numbers the episodes of a level. Token counts are sums over turns, by the server's own
    counts if it gives them. `thought_words` counts words, so that targets with different tokenizers
    compare. `valid_turns` counts turns with a valid reply, `effective_actions` actions that changed
    the environment. `error` is the traceback of a failed environment or the last error of a failed
    server; such an episode counts as no success.
    """

    env: str
    level_seed: int
    sample: int
    success: bool
    reward: float
    num_turns: int
    num_actions: int
    effective_actions: int
    valid_turns: int
    thought_words: int
    prompt_tokens: int
    completion_tokens: int
    stop_reason: StopReason
    error: str | None = None

    @property
    def failed(self) -> bool:
        """True if the environment or the server failed."""
        return self.error is not None

    @property
    def reason(self) -> str:
        """The last line of the error, or an empty string."""
        return last_line(self.error)


def _usage_of(turn: Turn) -> Usage:
    """Tokens of a turn: the server's count, or the number of ids; players have none."""
    ids = turn.prompt.token_ids or (), turn.completion.token_ids or ()
    return turn.completion.usage or Usage(*map(len, ids))


def outcome_of(episode: Episode) -> Outcome:
    """The outcome of an episode; its member is the sample."""
    turns = episode.turns
    return Outcome(
        env=episode.env,
        level_seed=episode.level_seed,
        sample=episode.member,
        success=episode.success,
        reward=episode.reward,
        num_turns=len(turns),
        num_actions=sum(len(turn.actions_executed) for turn in turns),
        effective_actions=sum(int(turn.info.get("effective", 0)) for turn in turns),
        valid_turns=sum(turn.valid for turn in turns),
        thought_words=sum(len((turn.thought or "").split()) for turn in turns),
        prompt_tokens=sum(_usage_of(turn).prompt_tokens for turn in turns),
        completion_tokens=sum(_usage_of(turn).completion_tokens for turn in turns),
        stop_reason=episode.stop_reason,
        error=episode.error,
    )


def refuse_unplayable(outcomes: Sequence[Outcome]) -> None:
    """Raise `UnplayableError` if all episodes failed, or none had room for its first prompt."""
    if outcomes and all(outcome.failed for outcome in outcomes):
        first = outcomes[0]
        if first.stop_reason == "request":
            raise UnplayableError(f"a request failed in every episode: {first.reason}")
        raise UnplayableError(
            f"playing {first.env!r} failed in every episode: {first.reason}; "
            "run `ragen check` on the environment or the function"
        )
    if outcomes and all(o.stop_reason == "context" and not o.num_turns for o in outcomes):
        raise UnplayableError(
            f"no first prompt of the environment {outcomes[0].env!r} leaves room for a reply; "
            "raise model.max_length, or lower rollout.max_tokens"
        )


def describe_failures(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for server failures and one for environment failures, with the commonest reason."""
    lines = []
    for where, at_server, advice in (
        ("at the server", True, "; the same command plays them again"),
        ("in the environment", False, ""),
    ):
        failed = [o for o in outcomes if o.failed and (o.stop_reason == "request") == at_server]
        if failed:
            ((reason, _),) = Counter(outcome.reason for outcome in failed).most_common(1)
            verb = "counts" if len(failed) == 1 else "count"
            lines.append(
                f"{len(failed)} of {len(outcomes)} episodes failed {where} and {verb} as no "
                f"success: {reason}{advice}"
            )
    return lines
