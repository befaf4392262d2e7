"""Whole episodes: one with all its turns, the episodes of a group side by side, and the tokens."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from statistics import stdev

from ragen.config.keys import Flat
from ragen.core.pictures import MARK, PLACE, key_of, keys_and_indices
from ragen.core.types import FAILED
from ragen.settings.saved import kept_texts
from ragen.storage.branches import FILE as BRANCHES
from ragen.storage.database import DATABASE
from ragen.viewer.episode_list import NAMED, as_json
from ragen.viewer.reading import Answer, NotFound, Question, RunReader, array_of, loaded, reading
from ragen.viewer.run_list import settings_of

FULL = f"{NAMED}, final_observation, final_drawing, final_pictures"

TURN = (
    "turn, observation, drawing, reply, thought, actions_asked, actions_executed, reward, penalty,"
    " valid, problem, num_tokens, completion_s, finish_reason, policy_version, state_key,"
    " prompt_joins, messages, results, parent, link, role, pictures"
)
"""The columns of a turn without its tokens."""

TRAINED = {
    "logprob": "old_logprobs",
    "entropy": "entropies",
    "advantage": "advantages",
    "return": "returns",
    "ratio": "ratios",
    "value": "values",
}
"""The numbers of a trained token, and their columns."""


def episode(asked: Question) -> Answer:
    """``/api/episode``: one episode, turn by turn."""
    with asked.reading() as run:
        found = detail(run, asked.whole_number("episode"))
        return found | {"still_counts": run.counts(found["attempt"], found["step"])}


def detail(run: RunReader, number: int) -> Answer:
    """An episode with its turns, its neighbours, and whether its tokens are recorded.

    The calls of an agent that are not trained on are ``others``, and numbered after the turns.
    """
    row = _row(run, number)
    rows = run.turns(f"{TURN}, completion_ids IS NOT NULL AS has_ids", number)
    has_ids = any(turn["has_ids"] for turn in rows)
    turns, count = [_turn(turn) for turn in rows], row["num_turns"]
    final = loaded(row["final_pictures"]) or []
    for turn, after in zip(turns, [*(turn["pictures"] for turn in turns[1:]), final], strict=True):
        turn["result_pictures"] = after if turn["results"] else []
        turn["pictures"] = _of_text(turn["observation"], turn["pictures"])
    return as_json(row) | {
        "final_drawing": loaded(row["final_drawing"]),
        "final_pictures": _of_text(row["final_observation"], final),
        "turns": turns[:count],
        "others": turns[count:],
        "previous": run.value("SELECT max(id) FROM episodes WHERE id < ?", number),
        "next": run.value("SELECT min(id) FROM episodes WHERE id > ?", number),
        "has_tokens": has_ids or bool(_samples(run, row, "1")),
    }


def _of_text(observation: str | None, pictures: list[str]) -> list[str]:
    """The pictures of an observation, which is the last of what the environment showed."""
    return pictures[len(pictures) - (observation or "").count(PLACE) :]


def _row(run: RunReader, number: int) -> sqlite3.Row:
    rows = run.rows(f"SELECT {FULL} FROM episodes WHERE id = ?", number)
    if not rows:
        raise NotFound(f"there is no episode {number} in this run")
    return rows[0]


def _turn(row: sqlite3.Row) -> Answer:
    turn = as_json(row)
    del turn["has_ids"]
    lists = ("drawing", "actions_asked", "actions_executed", "messages", "results")
    found = turn | {name: loaded(turn[name]) for name in lists}
    found["pictures"] = loaded(turn["pictures"]) or []
    if found["pictures"] and found["messages"]:
        found["messages"] = loaded(turn["messages"].replace(json.dumps(PLACE)[1:-1], MARK))
    return found


def picture(asked: Question) -> bytes:
    """``/api/picture``: the PNG file of a picture of a run or of its branches."""
    folder, key = asked.folder(), asked.text("hash")
    for name in (DATABASE, BRANCHES):
        if (folder / name).exists():
            with reading(folder, name) as run:
                png = run.value("SELECT png FROM pictures WHERE hash = ?", key)
            if isinstance(png, bytes):
                return png
    raise NotFound(f"there is no picture {key:.40} in this run")


def _samples(run: RunReader, row: sqlite3.Row, columns: str) -> list[sqlite3.Row]:
    """The recorded samples of an episode; only training has some."""
    if row["phase"] != "train":
        return []
    where = 'attempt = ? AND step = ? AND "group" = ? AND member = ?'
    place = (row[name] for name in ("attempt", "step", "group", "member"))
    return run.rows(f"SELECT {columns} FROM samples WHERE {where} ORDER BY id", *place)


def group(asked: Question) -> Answer:
    """``/api/group``: the episodes of one prompt, and how the filter treated them."""
    attempt, step, number = (asked.whole_number(name) for name in ("attempt", "step", "group"))
    where = "FROM episodes WHERE attempt = ? AND step = ? AND phase = ?"
    place = attempt, step, asked.text("phase")
    with asked.reading() as run:
        query = f'SELECT id {where} AND "group" = ? ORDER BY member, id'
        episodes = [detail(run, row["id"]) for row in run.rows(query, *place, number)]
        if not episodes:
            raise NotFound("there is no such group in this run")
        before = run.value(f'SELECT max("group") {where} AND "group" < ?', *place, number)
        after = run.value(f'SELECT min("group") {where} AND "group" > ?', *place, number)
        settings = _settings_at(run, attempt, step)
        counts = run.counts(attempt, step)
    rewards = [each["reward"] for each in episodes if each["stop_reason"] not in FAILED]
    shared = ("attempt", "step", "phase", "group", "level_seed", "kept", "group_score")
    return {
        **{name: episodes[0][name] for name in shared},
        "still_counts": counts,
        "rule": settings.get("filter.rule"),
        "score_name": settings.get("filter.score"),
        "value": settings.get("filter.value"),
        "include_zero": settings.get("filter.include_zero"),
        "num_played": len(rewards),
        "reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "previous": before,
        "next": after,
        "episodes": episodes,
    }


def _settings_at(run: RunReader, attempt: int, step: int) -> Flat:
    """The settings of a step: the first ones, with what rollbacks and the user changed since."""
    settings = settings_of(kept_texts(run.connection)[0].encode())
    for kind, data in run.rows(
        "SELECT kind, data FROM events WHERE kind = 'guard' AND data ->> 'attempt' <= ?"
        " OR kind = 'settings' AND (attempt, step) < (?, ?) ORDER BY id",
        attempt,
        attempt,
        step,
    ):
        changes = loaded(data)["changes"]
        settings |= changes if kind == "guard" else {key: new for key, (_, new) in changes.items()}
    return settings


def tokens(asked: Question) -> Answer:
    """``/api/tokens``: flat token sequences, in the order of the turns.

    The ``source`` is ``trained`` for the samples of the optimiser, with its numbers for each token;
    calls that are not trained on follow, with a mask of zeros. If a step has no recorded samples,
    it is ``turns``: the tokens that each turn recorded. ``pictures`` are the runs of picture tokens
    in a sample, each as its start, its end and the picture's hash.
    """
    number = asked.whole_number("episode")
    with asked.reading() as run:
        row = _row(run, number)
        samples = [_trained(sample) for sample in _samples(run, row, "*")]
        source = "trained" if samples else "turns"
        samples += _of_turns(run, number, row["num_turns"] if samples else None)
        ids = sorted({each for sample in samples for each in sample["ids"]})
        query = "SELECT id, text FROM tokens WHERE id IN (SELECT value FROM json_each(?))"
        texts = {row["id"]: row["text"] for row in run.rows(query, json.dumps(ids))}
        shown = [
            row["final_pictures"],
            *(turn["pictures"] for turn in run.turns("pictures", number)),
        ]
    hashes = {key_of(each): each for one in shown for each in loaded(one) or ()}
    for sample in samples:
        sample["texts"] = [texts.get(each, "") for each in sample["ids"]]
        sample["pictures"] = _runs(sample["ids"], hashes)
        # JavaScript has no such integers.
        sample["ids"] = [each if each >= 0 else None for each in sample["ids"]]
    return {"samples": samples, "source": source}


def _runs(ids: list[int], hashes: Mapping[int, str]) -> list[tuple[int, int, str | None]]:
    """The half-open ranges of picture tokens with consecutive indices."""
    places = [place for place, token in enumerate(ids) if token < 0]
    starts = [n for n in places if n == 0 or ids[n - 1] != ids[n] + 1]
    ends = [n + 1 for n in places if n + 1 == len(ids) or ids[n + 1] != ids[n] - 1]
    keys, _ = keys_and_indices([ids[start] for start in starts])
    return [(s, e, hashes.get(key)) for s, e, key in zip(starts, ends, keys.tolist(), strict=True)]


def _trained(sample: sqlite3.Row) -> Answer:
    ids, mask, turn = (
        array_of(name, sample[name]).tolist() for name in ("token_ids", "loss_mask", "turn_index")
    )
    found: Answer = {"ids": ids, "mask": [int(on) for on in mask], "turn": turn}
    for name, column in {"sampled_logprob": "sampled_logprobs", **TRAINED}.items():
        found[name] = None
        if sample[column] is not None:
            values = zip(array_of(column, sample[column]).tolist(), mask, strict=True)
            found[name] = [value if on else None for value, on in values]
    return found


def _of_turns(run: RunReader, episode: int, num_trained: int | None) -> list[Answer]:
    """Sequences from the turns; a turn whose prompt extends a whole sequence joins it.

    If `num_trained` is given, they begin with that turn, and their mask is 0.
    """
    found: list[Answer] = []
    before: list[int] = []
    columns = "turn, prompt_ids, prompt_joins, completion_ids, logprobs"
    for row in run.turns(columns, episode):
        if row["prompt_ids"] is None or row["completion_ids"] is None:
            continue
        prompt = array_of("prompt_ids", row["prompt_ids"]).tolist()
        prompt = before * bool(row["prompt_joins"]) + prompt
        completion = array_of("completion_ids", row["completion_ids"]).tolist()
        before = prompt + completion
        if row["turn"] < (num_trained or 0):
            continue
        known: list[float | None] = [None] * len(completion)
        if row["logprobs"] is not None:
            known = array_of("logprobs", row["logprobs"]).tolist()
        fits = [each for each in found if each["ids"] == prompt[: len(each["ids"])]]
        if not fits:
            untrained = dict.fromkeys(TRAINED)
            found.append({"ids": [], "mask": [], "turn": [], "sampled_logprob": [], **untrained})
        last = max(fits, key=lambda each: len(each["ids"]), default=found[-1])
        rest = prompt[len(last["ids"]) :]
        last["ids"] += rest + completion
        last["mask"] += [0] * len(rest) + [int(num_trained is None)] * len(completion)
        last["turn"] += [-1] * len(rest) + [row["turn"]] * len(completion)
        last["sampled_logprob"] += [None] * len(rest) + known
    return found
