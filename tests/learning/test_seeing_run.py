"""A model that sees, in an environment that shows pictures: its episodes, a run, and its export."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ragen.algorithms.batch import collate
from ragen.algorithms.samples import to_samples
from ragen.cli.main import main
from ragen.config.reading import merge
from ragen.core.types import Group
from ragen.learning.exactness import verify, with_fingerprints
from ragen.models.loading import load_policy
from ragen.networks.pictures import reader_of
from ragen.rollout.episode import play_episode
from ragen.rollout.groups import together
from ragen.rollout.setup import EpisodeSpec, make_chat, make_setup
from ragen.sampling.local_sampler import Sampler
from ragen.storage.reader import read_metrics
from tests.learning.test_seeing import learner_of
from tests.seeing import board, folder_of, seeing
from tests.tolerance import LOGPROB

KEYS: dict[str, Any] = {
    "env.name": "frozen-lake-still",
    "env.params.observation": "picture",
    "env.max_turns": 2,
    "prompt.style": "compact",
    "rollout.max_tokens": 6,
    "model.max_length": 1000,
}


def test_episodes_of_an_environment_are_trained_as_they_were_sampled() -> None:
    model, tokenizer = seeing("llava")
    config = merge(None, KEYS)
    chat = make_chat(config, tokenizer)
    sampler = Sampler(model, chat, slots=2, max_length=1000)

    async def played() -> list[Any]:
        specs = [EpisodeSpec(group // 2, group % 2, 1, (group // 2, "it")) for group in range(4)]
        return await together([play_episode(sampler, setup, spec) for spec in specs])

    with closing(make_setup(config, chat)) as setup:
        episodes = asyncio.run(played())
    groups = [Group(tuple(episodes[:2])), Group(tuple(episodes[2:]))]
    shown = {picture for each in episodes for turn in each.turns for picture in turn.pictures}
    samples, kept = to_samples(groups)
    batch = with_fingerprints(collate(samples), kept)
    assert len(shown) >= 2 and set(batch.pictures) == shown
    verify([batch])
    logprobs_BT, _ = learner_of(model).logprobs(batch)
    gap = (logprobs_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs()
    assert len(gap) and float(gap.max()) < LOGPROB


@pytest.mark.slow
def test_a_run_is_exact_and_its_export_reads_pictures(tmp_path: Path) -> None:
    kind = "qwen3_vl"
    keys = KEYS | {
        "model.path": folder_of(kind),
        "steps": 2,
        "threads": 1,
        "rollout.num_groups": 2,
        "rollout.group_size": 2,
        "update.minibatch_episodes": 2,
        "eval.every": 0,
        "eval.episodes": 2,
        "diagnose.information_every": 1,
    }
    arguments = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    assert main(["train", *arguments, "--out", str(tmp_path / "run")]) == 0
    gaps = read_metrics(tmp_path / "run")["mismatch/max_abs"]
    assert len(gaps) == 2 and max(gaps.values()) < LOGPROB
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "it")]) == 0
    _, tokenizer = load_policy(tmp_path / "it", "cpu", "float32")
    assert reader_of(tokenizer)(board(1)) == reader_of(seeing(kind)[1])(board(1))
