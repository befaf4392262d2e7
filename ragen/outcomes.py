"""What came of an evaluation episode, and where such outcomes are kept."""

from __future__ import annotations

from dataclasses import dataclass

from ragen.types import Episode, StopReason


@dataclass(frozen=True, slots=True)
class Outcome:
    """One episode of an evaluation, in numbers.

    `sample` counts the episodes of a level. Tokens are summed over the turns, those of a server as
    it counted them; `thought_words` are the thoughts' words, which every target has alike.
    `valid_turns` had a valid reply, `effective_actions` changed the world. `error` is the traceback
    of a world, or the last complaint of a server, that failed: such an episode is no success.

    Example:
        >>> lost = Outcome("bandit", 123, 0, False, 0.0, 1, 1, 1, 1, 7, 90, 12, "failed")
        >>> lost.failed, lost.total_reward
        (False, 0.0)
    """

    world: str
    level_seed: int
    sample: int
    success: bool
    total_reward: float
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
        """Whether the world or the server failed in it, so that it says little of the agent."""
        return self.error is not None


def outcome_of(episode: Episode) -> Outcome:
    """What came of an episode; its member is the sample."""
    turns = episode.turns
    return Outcome(
        world=episode.world,
        level_seed=episode.level_seed,
        sample=episode.member,
        success=episode.success,
        total_reward=episode.total_reward,
        num_turns=len(turns),
        num_actions=sum(len(turn.actions_executed) for turn in turns),
        effective_actions=sum(int(turn.info.get("effective", 0)) for turn in turns),
        valid_turns=sum(turn.well_formed for turn in turns),
        thought_words=sum(len((turn.thought or "").split()) for turn in turns),
        prompt_tokens=sum(len(turn.prompt.token_ids or ()) for turn in turns),
        completion_tokens=sum(len(turn.completion.token_ids or ()) for turn in turns),
        stop_reason=episode.stop_reason,
        error=episode.error,
    )
