"""The metrics of every step: rewards, format, text, and moving averages.

A new metric of the episodes is a line in `summarize`, one of the trained batch in `batch_metrics`.
Names of metrics are paths. A metric that cannot be computed (no thought, no token ids) is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import isfinite
from statistics import fmean

import numpy as np
from torch import Tensor

from ragen.algorithms.batch import Batch
from ragen.algorithms.filters import reward_std
from ragen.algorithms.losses import k3
from ragen.config.extensions import short_names
from ragen.core.metrics import IGNORED, OF_ENV, Metrics, largest, last, mean, total
from ragen.core.statistics import all_equal
from ragen.core.types import Call, Episode, Group, Turn
from ragen.engines.engine import Engine
from ragen.gateway.grades import GRADES
from ragen.gateway.session import FIRST_CALL
from ragen.rollout.reward_terms import repeated_ngrams, reward_term_metrics, thought_metrics

EMA_WEIGHT = 0.1
"""Weight of the newest value in a moving average: the last ten values make up two thirds."""


def summarize(groups: Sequence[Group], kept: Sequence[int]) -> Metrics:
    """All metrics of a step's episodes, for which no learner is needed.

    Failed episodes are counted and enter no other metric. Groups with fewer than two others have no
    in-group std. `kept` are the indices of the groups that the filter kept.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    played = [episode for episode in episodes if not episode.failed]
    turns = [turn for episode in played for turn in episode.turns]
    kept_set = {*kept}
    comparable = [g for g in groups if sum(not episode.failed for episode in g.episodes) > 1]
    stds = [reward_std(group) for group in comparable]
    replies = [t.completion.token_ids for t in turns if t.completion.token_ids is not None]
    spans = [turn.thought_span for turn in turns if turn.thought_span is not None]
    thoughts = [turn.thought for turn in turns if turn.thought is not None]
    repeated = [repeated_ngrams(thought) for thought in thoughts]
    means: dict[str, Sequence[float]] = {
        "filter/kept_fraction": [index in kept_set for index in range(len(groups))],
        "reward/mean": [episode.reward for episode in played],
        "success/mean": [episode.success for episode in played],
        "episodes/truncated_fraction": [episode.truncated for episode in played],
        "turns/mean": [len(episode.turns) for episode in played],
        "reward/std_in_group": stds,
        "reward/flat_group_fraction": [std == 0 for std in stds],
        "actions/per_turn": [len(turn.actions_executed) for turn in turns],
        "format/valid_fraction": [turn.valid for turn in turns],
        "length/completion_tokens": [len(token_ids) for token_ids in replies],
        "length/cut_fraction": [turn.completion.finish_reason == "length" for turn in turns],
        "length/thought_tokens": [stop - start for start, stop in spans],
        "text/degenerate_fraction": [is_degenerate(token_ids) for token_ids in replies],
        "prompt/turns_dropped": [turn.prompt.turns_dropped for turn in turns],
        "thought/repeated_ngram_fraction": [share for share in repeated if share is not None],
    }
    metrics = {name: mean(fmean(items), len(items)) for name, items in means.items() if items}
    if stds:
        metrics["reward/std_in_group_max"] = largest(max(stds))
    if thoughts:
        unique = len(set(thoughts)) / len(thoughts)
        metrics["thought/unique_fraction"] = mean(unique, len(thoughts))
    reporting = [turn for turn in turns if "effective" in turn.info]
    if executed := sum(len(turn.actions_executed) for turn in reporting):
        changed = sum(turn.info["effective"] for turn in reporting)
        metrics["actions/effective_fraction"] = mean(changed / executed, executed)
    counts = {
        "episodes/failed": total(len(episodes) - len(played)),
        "episodes/played": total(len(played)),
        "tokens/sampled": total(sum(map(len, replies))),
    }
    more = (
        reward_term_metrics(played),
        thought_metrics(turns),
        summary_metrics(played),
        agent_metrics(played),
    )
    return {**metrics, **counts, **{name: each for part in more for name, each in part.items()}}


def summary_metrics(played: Sequence[Episode]) -> Metrics:
    """Learned summaries: how many an episode was asked for, their tokens, the share rejected.

    Nothing without any. An agent's own are among its calls (`agent_metrics`).
    """
    episodes = [episode for episode in played if _in_environment(episode)]
    others = [turn for episode in episodes for turn in episode.others]
    kept = [turn for each in episodes for turn in each.turns if turn.call is not None]
    if not (made := [*kept, *others]):
        return {}
    return {
        "summary/per_episode": mean(len(made) / len(episodes), len(episodes)),
        "summary/tokens": mean(fmean(map(_num_sampled, made)), len(made)),
        "summary/rejected_fraction": mean(len(others) / len(made), len(made)),
    }


def _in_environment(episode: Episode) -> bool:
    """True unless an agent played, all of whose turns are calls."""
    return bool(episode.turns) and episode.turns[0].call is None


def agent_metrics(played: Sequence[Episode]) -> Metrics:
    """How the calls of existing agents became samples; nothing for environments.

    A root begins a conversation, and a fork continues a reply that another call continues already.
    """
    played = [episode for episode in played if not _in_environment(episode)]
    turns = [turn for episode in played for turn in (*episode.turns, *episode.others)]
    made = [(turn, turn.call) for turn in turns if turn.call is not None]
    if not made:
        return {}
    calls = [turn.call for episode in played for turn in episode.turns if turn.call is not None]
    parents = [[turn.call.parent for turn in each.turns if turn.call] for each in played]
    roots = [sum(parent < 0 for parent in each) for each in parents]
    continued = [[parent for parent in each if parent >= 0] for each in parents]
    forks = sum(len(each) - len({*each}) for each in continued)
    counts = Counter({"agent/calls": len(made), "agent/roots": sum(roots), "agent/forks": forks})
    for turn, call in made:
        if tokens := _num_sampled(turn):
            counts[f"agent/{call.role}_tokens"] += tokens
        counts["agent/retries"] += turn.info.get("retries", 0)
        counts.update(f"{IGNORED}{name}" for name in turn.info.get("ignored", ()))
    metrics = {name: total(count) for name, count in counts.items()}
    share, sampled = untrained(played)
    if sampled:
        metrics["agent/untrained_fraction"] = mean(share, sampled)
    if calls:
        is_same = [is_verbatim(each) for each in calls]
        metrics["agent/roots_per_episode"] = mean(fmean(roots), len(roots))
        metrics["agent/fork_fraction"] = mean(forks / len(calls), len(calls))
        metrics["agent/verbatim_fraction"] = mean(fmean(is_same), len(calls))
    return metrics


def untrained(episodes: Iterable[Episode]) -> tuple[float, int]:
    """The share of sampled tokens whose calls are not trained on, and the number of sampled ones.

    Such calls are those whose roles are not among `TRAINED_ROLES`.
    """
    trained = left = 0
    for episode in episodes:
        trained += sum(map(_num_sampled, episode.turns))
        left += sum(map(_num_sampled, episode.others))
    sampled = trained + left
    return (left / sampled if sampled else 0.0), sampled


def _num_sampled(turn: Turn) -> int:
    return len(turn.completion.token_ids or ())


def is_verbatim(call: Call) -> bool:
    """True if a call's history repeats the policy's reply as it was sent, or has none."""
    return call.link in (FIRST_CALL, GRADES[0])


def summarize_envs(groups: Sequence[Group], kept: Sequence[int], mix: Iterable[str]) -> Metrics:
    """The metrics ``env/<name>/success`` and so on (`OF_ENV`) of each environment of a mixture.

    `mix` names all environments of the run; the step's groups may lack some.
    """
    metrics, names, kept_set = Metrics(), short_names(mix), {*kept}
    for env in dict.fromkeys(group.env for group in groups):
        places = [index for index, group in enumerate(groups) if group.env == env]
        own = [place for place, index in enumerate(places) if index in kept_set]
        found = summarize([groups[index] for index in places], own)
        metrics |= {
            f"env/{names[env]}/{name}": found[whole]
            for whole, name in OF_ENV.items()
            if whole in found
        }
    return metrics


def is_degenerate(token_ids: Sequence[int]) -> bool:
    """True if one token comes 8 times in a row and makes up half of a completion: "!!!!!!!!"."""
    longest = max((len(list(run)) for _, run in groupby(token_ids)), default=0)
    return longest >= 8 and 2 * longest >= len(token_ids)


def batch_metrics(batch: Batch) -> Metrics:
    """Explained variance of the critic and KL to the reference, over all sampled tokens.

    The KL is KL(policy ‖ reference) in nats by k3, whether the reward or the loss penalises it.
    """
    mask, metrics = batch.mask_BT, Metrics()
    if not bool(mask.any()):
        return metrics
    if batch.values_BT is not None and batch.returns_BT is not None:
        metrics |= explained_variance(batch.values_BT[mask], batch.returns_BT[mask])
    if batch.reference_logprobs_BT is not None and batch.old_logprobs_BT is not None:
        kl_N = k3(batch.old_logprobs_BT[mask], batch.reference_logprobs_BT[mask])
        metrics["kl/reference"] = mean(kl_N.mean().item(), len(kl_N))
    return metrics


def explained_variance(values_N: Tensor, returns_N: Tensor) -> Metrics:
    """The share of the returns' variance that the critic predicts: 1 − Var(R − V) ÷ Var(R).

    It is 1 for a perfect critic, 0 for one that predicts the mean, and below 0 for a worse one.
    Empty if all returns are equal, up to rounding.
    """
    returns_N, values_N = returns_N.double(), values_N.double()  # squares of large returns
    if len(returns_N) < 2 or all_equal([returns_N.min().item(), returns_N.max().item()]):
        return {}
    unexplained = float((returns_N - values_N).var() / returns_N.var())
    return {"critic/explained_variance": mean(1 - unexplained, len(returns_N))}


def smooth(averages: Mapping[str, float], metrics: Metrics) -> dict[str, float]:
    """Exponential moving averages after one more step: a ← a + w (x − a), starting at the first x.

    Only metrics that are means have one, not sums, maxima and last values. A metric that is missing
    from this step, or not finite, keeps its average.
    """
    new = {name: m.value for name, m in metrics.items() if m.kind == "mean" and isfinite(m.value)}
    return dict(averages) | {
        name: x + (1 - EMA_WEIGHT) * (averages.get(name, x) - x) for name, x in new.items()
    }


def averaged(averages: Mapping[str, float], metrics: Metrics) -> Metrics:
    """The moving averages of a step's metrics, as ``ema/<name>``."""
    return {f"ema/{name}": last(averages[name]) for name in metrics if name in averages}


NUM_BUCKETS = 4
"""Quartiles of the in-group reward std, as arXiv:2604.06268 compares them."""


async def gradients_by_std(engine: Engine, batch: Batch, groups: Sequence[Group]) -> Metrics:
    """Gradient norms of task, entropy and KL by quartile of the in-group reward std.

    RAGEN-2 (arXiv:2604.06268) expects of a healthy signal that the task's gradient norm grows with
    the std, and that the norms of the regularisers do not. Measuring changes no state.

    The engine has the weights that played the groups, which `Batch.group_B` indexes; the batch has
    advantages. For each bucket that holds a row, from 0 for the lowest:
    ``gradient_by_std/<bucket>/<term>_per_token``, ``…_per_sample``, the mean ``reward_std`` of its
    groups, and the number of its ``groups``.
    """
    stds = {index: reward_std(groups[index]) for index in sorted(set(batch.group_B.tolist()))}
    bucket_of = dict(zip(stds, std_buckets(list(stds.values())), strict=True))
    bucket_B = batch.group_B.new_tensor([bucket_of[index] for index in batch.group_B.tolist()])
    metrics = await engine.gradient_norms(batch, bucket_B)
    for bucket in sorted(set(bucket_of.values())):
        inside = [std for index, std in stds.items() if bucket_of[index] == bucket]
        metrics[f"{bucket}/reward_std"] = last(fmean(inside))
        metrics[f"{bucket}/groups"] = last(len(inside))
    return {f"gradient_by_std/{name}": metric for name, metric in metrics.items()}


def std_buckets(stds: Sequence[float]) -> list[int]:
    """The quartile of each group's reward std, from 0. Equal stds share the lowest quartile."""
    edges = np.quantile(stds, np.arange(1, NUM_BUCKETS) / NUM_BUCKETS)
    buckets: list[int] = np.searchsorted(edges, stds, side="left").tolist()
    return buckets
