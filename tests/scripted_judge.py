"""A judge on loopback whose scores are a function of what it reads, and what it reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.faulty import Answer, FaultyServer, chat_reply

Shown = list[dict[str, str]]
"""An episode as the judge reads it."""


def shown(body: dict[str, Any]) -> list[Shown]:
    """The episodes of a question, in their order."""
    episodes = json.loads(body["messages"][1]["content"])["episodes"]
    assert [each["id"] for each in episodes] == list(range(1, len(episodes) + 1))
    return [each["turns"] for each in episodes]


def answer(scores: list[float]) -> Answer:
    """A well-formed answer."""
    rows = [{"id": i, "why": "so", "score": score} for i, score in enumerate(scores, 1)]
    return chat_reply(json.dumps({"scores": rows}))


def scripted_judge(score: Callable[[Shown, int], float]) -> FaultyServer:
    """A server that gives each episode the score of its turns and its place, counted from 0."""
    return FaultyServer(
        lambda _, body: answer([score(turns, place) for place, turns in enumerate(shown(body))])
    )
