"""`ragen export --episodes` and `--trace`: all episodes of a run in one file, one row each.

The former writes JSON lines or Parquet, and pictures into a folder beside them; the latter writes
the lines of another contract. Rows are written as they are read, so memory does not grow with the
run, which may be in progress.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ragen.core.errors import RagenError
from ragen.core.files import file_errors, whole_file
from ragen.core.pictures import MARK, PLACE, for_people
from ragen.core.types import FAILED
from ragen.storage.database import reading_database
from ragen.storage.schema import EPISODE, TURN, Row, as_json
from ragen.storage.stored_episodes import records, stored_picture

ROWS_AT_ONCE = 256
"""Episodes of one Parquet row group: a few megabytes, and enough to compress well."""

COLUMNS = {"id": "int64", **EPISODE}

TURN_COLUMNS = {name: kind for name, kind in TURN.items() if name != "prompt_joins"}
"""The columns of a turn; its prompt is whole."""

TOKENS = ("prompt_ids", "completion_ids", "logprobs")
PICTURES = "pictures"
_PLACE = as_json(PLACE)[1:-1]
OF_EPISODE = ("id", "phase", "step", "group", "member", "reward", "stop_reason")
OF_TURN = ("turn", "parent", "link", "policy_version", "reward", "penalty")
"""The columns of an episode and of a turn in the metadata of a trace, which is free in form."""

Writer = Callable[[Iterator[Row], Path], int]
"""Writes rows to a file and returns their number."""


def export_episodes(run: Path, out: Path) -> int:
    """Write all episodes of a run to a new ``.jsonl`` or ``.parquet`` file; return their number.

    Their pictures become files ``pictures/HASH.png`` beside it.
    """
    if out.suffix not in _WRITERS:
        raise RagenError(f"{out}: expected a name that ends in {' or '.join(_WRITERS)}")
    return _write(_readable(run, out.parent / PICTURES), out, _WRITERS[out.suffix])


def _readable(run: Path, folder: Path) -> Iterator[Row]:
    """The rows of episodes, whose pictures become files in `folder`; texts have `MARK`s there."""
    for episode in records(run):
        turns = episode["turns"]
        keys = {
            *(episode["final_pictures"] or ()),
            *(k for t in turns for k in t["pictures"] or ()),
        }
        if keys:
            _write_pictures(run, keys, folder)
            episode["final_observation"] = for_people(episode["final_observation"] or "") or None
            for turn in turns:
                turn["observation"] = for_people(turn["observation"])
                turn["results"] = turn["results"] and [*map(for_people, turn["results"])]
                turn["messages"] = turn["messages"] and turn["messages"].replace(_PLACE, MARK)
        yield episode


def _write_pictures(run: Path, keys: Iterable[str], folder: Path) -> None:
    """Write the pictures that no earlier export has written."""
    with reading_database(run) as connection, file_errors("write", folder):
        folder.mkdir(exist_ok=True)
        for key in keys:
            if not (folder / f"{key}.png").exists():
                with whole_file(folder / f"{key}.png") as temporary:
                    temporary.write_bytes(stored_picture(connection, key))


def export_traces(run: Path, out: Path) -> int:
    """Write all episodes of a run to a new file of JSON lines; return their number.

    Each line is a ``TrainingTrace`` of OpenEnv (``schema_version`` 1): each turn's exact ids of
    prompt and completion, the logprobs at sampling, and a mask over both, which is 1 on sampled
    tokens. In an episode that failed it is 0, because no reward says what these are worth. Calls
    of an agent in other roles than ``agent`` are left out.

    Raises:
        RagenError: An episode has no token ids, as from a chat endpoint, or it has pictures.
    """
    return _write(map(_trace, records(run)), out, _write_json_lines)


def _trace(episode: Row) -> Row:
    is_trained = episode["stop_reason"] not in FAILED
    turns = episode["turns"][: episode["num_turns"]]
    return {"schema_version": 1, "turns": [_traced(episode, turn, is_trained) for turn in turns]}


def _traced(episode: Row, turn: Row, is_trained: bool) -> Row:
    prompt, completion, logprobs = (turn[name] for name in TOKENS)
    if prompt is None or completion is None or logprobs is None:
        raise RagenError(
            f"episode {episode['id']} has no token ids, which a trace consists of: its policy "
            "returned only text; export the text with --episodes"
        )
    if min(prompt, default=0) < 0:
        raise RagenError(
            f"episode {episode['id']} shows pictures, for which a trace has no place: export it "
            "with --episodes"
        )
    message = {"role": "assistant", "content": turn["reply"]}
    choice = {"message": message, "finish_reason": turn["finish_reason"]}
    return {
        "node_id": f"{episode['id']}/{turn['turn']}",
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "per_token_logps": logprobs,
        "loss_mask": [0] * len(prompt) + [int(is_trained)] * len(completion),
        "response": {"choices": [choice]},
        "metadata": {f"episode_{name}": episode[name] for name in OF_EPISODE}
        | {name: turn[name] for name in OF_TURN},
    }


def _write(rows: Iterator[Row], out: Path, writer: Writer) -> int:
    if out.exists():
        raise RagenError(f"{out} exists already; name a file that does not")
    with file_errors("write", out), whole_file(out) as temporary:
        return writer(rows, temporary)


def _write_json_lines(rows: Iterator[Row], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
            count += 1
    return count


def _write_parquet(rows: Iterator[Row], path: Path) -> int:
    try:
        import pyarrow as arrow
        from pyarrow.parquet import ParquetWriter
    except ImportError:
        raise RagenError(
            "writing Parquet needs pyarrow: pip install 'ragen-rl[parquet]', or name a .jsonl file"
        ) from None

    def type_of(kind: str) -> Any:
        if kind.endswith("s"):
            return arrow.list_(type_of(kind.removesuffix("s")))
        return arrow.type_for_alias({"text": "string", "json": "string"}.get(kind, kind))

    def fields(columns: dict[str, str]) -> list[Any]:
        return [arrow.field(name, type_of(kind.rstrip("?"))) for name, kind in columns.items()]

    turns = arrow.field("turns", arrow.list_(arrow.struct(fields(TURN_COLUMNS))))
    schema = arrow.schema([*fields(COLUMNS), turns])
    count = 0
    with ParquetWriter(path, schema, compression="zstd") as writer:
        while part := list(islice(rows, ROWS_AT_ONCE)):
            writer.write_table(arrow.Table.from_pylist(part, schema))
            count += len(part)
    return count


_WRITERS: dict[str, Writer] = {
    ".jsonl": _write_json_lines,
    ".parquet": _write_parquet,
}
