"""Thousands of calls of agents whose connections drop, which ask again, fork, raise and are killed.

`RAGEN_TEST_CALLS` sets their number; without it the test takes some 20 CPU seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ragen.algorithms.batch import collate
from ragen.algorithms.samples import to_samples
from ragen.chat.chat import Chat
from ragen.config.reading import merge
from ragen.core.types import Completion, Episode, Prompt
from ragen.core.waiting import begin
from ragen.learning.exactness import with_fingerprints
from ragen.rollout.groups import run_groups
from ragen.rollout.policies import written_completion
from ragen.rollout.setup import make_setup
from tests.gateway.unreliable import CALLS
from tests.tiny import tiny_tokenizer

AGENT = Path(__file__).with_name("unreliable.py")
FORMS = (f"{AGENT}:main", f"{sys.executable} {AGENT}")
NUM_CALLS = int(os.environ.get("RAGEN_TEST_CALLS", "1600"))


class Counting:
    """A policy that takes some time; it counts its completions when the caller gets them."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.made: list[str] = []
        self.asked: Counter[str] = Counter()

    async def complete(self, prompt: Prompt) -> Completion:
        await asyncio.sleep(random.Random(prompt.seed).uniform(0.0, 0.004))
        text = f"Reply {len(self.made)}."
        self.made.append(text)
        self.asked[str(prompt.token_ids)] += 1
        return written_completion(text, lambda t: (*self._chat.encode_text(t), self._chat.end))


def processes() -> list[str]:
    """The processes of agents that run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = folder.joinpath("cmdline").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if any(word.startswith(os.fsencode(AGENT)) for word in words):
            found.append(folder.name)
    return found


def open_files() -> dict[str, str]:
    """What this process has open, by number."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=["coroutine", "command"])
def test_no_call_is_lost_or_trained_twice(form: str, tmp_path: Path, record_property: Any) -> None:
    num_tasks = NUM_CALLS // (len(FORMS) * CALLS)
    ends = {num_tasks // 3: "die", num_tasks // 2: "die"}
    tasks = [
        {"seed": n, "end": ends.get(n, "leave" if n % 7 else "raise")} for n in range(num_tasks)
    ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    (tmp_path / "test.jsonl").write_text('{"seed": -1}')
    params = {"tasks": str(tmp_path / "tasks.jsonl"), "test_tasks": str(tmp_path / "test.jsonl")}
    given = {
        "env.name": f"agent:{form}",
        "env.params": params | {"processes": 2},
        "env.max_turns": 100,
        "prompt.think": False,
        "model.max_length": 2000,
    }
    chat = Chat(tiny_tokenizer("chatml"), think=False)
    begin(asyncio.sleep(0)).result()  # the process's loop for asynchronous code stays
    policy, before = Counting(chat), open_files()
    began = time.process_time()
    with closing(make_setup(merge(None, given), chat)) as setup:
        levels = range(10_000, 10_000 + num_tasks)
        groups = asyncio.run(run_groups(policy, setup, levels, 1, (0, "t"), 32))
    record_property("milliseconds", 1000 * (time.process_time() - began) / len(policy.made))
    episodes: list[Episode] = [group.episodes[0] for group in groups]
    turns = [turn for each in episodes for turn in (*each.turns, *each.others)]
    record_property("sampled", len(policy.made))
    record_property("retries", sum(turn.info.get("retries", 0) for turn in turns))
    # Nothing is lost, and nothing is in two places.
    assert sorted(turn.completion.text for turn in turns) == sorted(policy.made)
    # A retry has the reply of the first request.
    assert max(policy.asked.values()) == 1
    # Each trained token is in one sample, with its logprob.
    samples, trained = to_samples(groups)
    with_fingerprints(collate(samples), trained)
    sampled = [turn for each in trained for turn in each.turns]
    assert sum(map(sum, (sample.loss_mask for sample in samples))) == sum(
        len(turn.completion.token_ids or ()) for turn in sampled
    )
    # Only agents that raise, that die, or that were in a process that died, have failed.
    errors = Counter(each.error for each in episodes if not each.success)
    known = "it lost its way", "ended by signal 9"
    assert all(str(error).endswith(known) for error in errors), errors
    assert sum(each.success for each in episodes) > num_tasks / 4
    assert not processes()
    assert open_files().items() <= before.items()
