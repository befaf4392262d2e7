"""The tokens of an episode: prompts, completions, and the numbers of the optimiser."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ragen.storage.schema import TURNS_AN_EPISODE
from ragen.viewer.episode_page import episode_row
from ragen.viewer.reading import Answer, Query, array_of, folder_of, reading, whole_number

TRAINED = {
    "logprob": "old_logprobs",
    "entropy": "entropies",
    "advantage": "advantages",
    "return": "returns",
    "ratio": "ratios",
    "value": "values",
}
"""The numbers of a trained token, and their columns."""

UNTRAINED: Answer = dict.fromkeys(TRAINED)


def tokens(root: Path, query: Query) -> Answer:
    """``/api/tokens``: flat token sequences, in the order of the turns.

    The ``source`` is ``trained`` for the samples of the optimiser, with its numbers for each token.
    If those of a step are not recorded, it is ``turns``: the tokens that each turn recorded.

    Raises:
        Unanswered: There is no such run or episode, or the run cannot be read.
    """
    folder, number = folder_of(root, query), whole_number(query, "episode")
    with reading(folder) as connection:
        row = episode_row(connection, number)
        samples = _trained(connection, row) if row["phase"] == "train" else []
        source = "trained" if samples else "turns"
        samples = samples or _of_turns(connection, number)
        texts = _texts(connection, {each for sample in samples for each in sample["ids"]})
    for sample in samples:
        sample["texts"] = [texts.get(each, "") for each in sample["ids"]]
    return {"samples": samples, "source": source}


def _trained(connection: sqlite3.Connection, row: sqlite3.Row) -> list[Answer]:
    found = []
    for sample in connection.execute(
        'SELECT * FROM samples WHERE attempt = ? AND step = ? AND "group" = ? AND member = ?'
        " ORDER BY id",
        [row[name] for name in ("attempt", "step", "group", "member")],
    ):
        mask = array_of("loss_mask", sample["loss_mask"])
        arrays: Answer = {
            name: _masked(array_of(column, sample[column]), mask)
            if sample[column] is not None
            else None
            for name, column in ({"sampled_logprob": "sampled_logprobs"} | TRAINED).items()
        }
        ids = array_of("token_ids", sample["token_ids"])
        turn = array_of("turn_index", sample["turn_index"])
        flat = {"ids": ids.tolist(), "mask": mask.astype(int).tolist(), "turn": turn.tolist()}
        found.append(flat | arrays)
    return found


def _masked(values: NDArray[Any], mask: NDArray[Any]) -> list[float | None]:
    """The values of the trained tokens; ``None`` for other tokens and for NaN."""
    pairs = zip(values.tolist(), mask.tolist(), strict=True)
    return [value if on and math.isfinite(value) else None for value, on in pairs]


def _of_turns(connection: sqlite3.Connection, episode: int) -> list[Answer]:
    """Sequences from the turns; a turn whose prompt extends the tokens so far joins them."""
    found: list[Answer] = []
    for row in connection.execute(
        "SELECT turn, prompt_ids, prompt_joins, completion_ids, logprobs FROM turns"
        " WHERE id BETWEEN ? AND ? AND prompt_ids IS NOT NULL AND completion_ids IS NOT NULL"
        " ORDER BY id",
        (episode * TURNS_AN_EPISODE, (episode + 1) * TURNS_AN_EPISODE - 1),
    ):
        prompt, completion = (
            array_of(name, row[name]).tolist() for name in ("prompt_ids", "completion_ids")
        )
        given = row["logprobs"]
        known = (
            [math.nan] * len(completion) if given is None else array_of("logprobs", given).tolist()
        )
        if not (row["prompt_joins"] and found):
            found.append({"ids": [], "mask": [], "turn": [], "sampled_logprob": []} | UNTRAINED)
        last = found[-1]
        last["ids"] += prompt + completion
        last["mask"] += [0] * len(prompt) + [1] * len(completion)
        last["turn"] += [-1] * len(prompt) + [row["turn"]] * len(completion)
        last["sampled_logprob"] += [None] * len(prompt)
        last["sampled_logprob"] += [value if math.isfinite(value) else None for value in known]
    return found


def _texts(connection: sqlite3.Connection, ids: set[Any]) -> dict[int, str]:
    rows = connection.execute(
        "SELECT id, text FROM tokens WHERE id IN (SELECT value FROM json_each(?))",
        (json.dumps(sorted(ids)),),
    )
    return dict(rows.fetchall())
