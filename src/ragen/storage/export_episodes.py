"""`ragen export --episodes`: all episodes of a run as JSON lines or Parquet, one row each.

Rows are written as they are read, so memory use does not grow with the run. A run in progress can
be exported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ragen.core.errors import RagenError
from ragen.core.files import file_errors, whole_file
from ragen.storage.stored_episodes import Record, records

ROWS_AT_ONCE = 256
"""Episodes of one Parquet row group: a few megabytes, and enough to compress well."""

TURN: dict[str, str] = {
    "turn": "int32",
    "observation": "text",
    "picture": "texts",
    "reply": "text",
    "thought": "text",
    "actions_asked": "texts",
    "actions_executed": "texts",
    "reward": "float64",
    "penalty": "float64",
    "well_formed": "bool",
    "num_tokens": "int32",
    "finish_reason": "text",
    "policy_version": "int32",
    "state_key": "text",
    "snapshot": "text",
    "prompt_ids": "int32s",
    "completion_ids": "int32s",
    "logprobs": "float32s",
    "thought_start": "int32",
    "thought_end": "int32",
}
"""The columns of a turn; `docs/episodes.md` describes them."""

EPISODE: dict[str, str] = {
    "id": "int64",
    "attempt": "int32",
    "step": "int32",
    "phase": "text",
    "group": "int32",
    "member": "int32",
    "kept": "bool",
    "group_score": "float64",
    "env": "text",
    "level_seed": "int64",
    "noise_seed": "int64",
    "stop_reason": "text",
    "terminated": "bool",
    "truncated": "bool",
    "success": "bool",
    "reward": "float64",
    "penalty": "float64",
    "num_turns": "int32",
    "num_tokens": "int32",
    "thought_tokens": "int32",
    "entropy": "float64",
    "error": "text",
    "final_observation": "text",
    "final_picture": "texts",
}
"""The columns of an episode, apart from ``turns``."""


def export_episodes(run: Path, out: Path) -> int:
    """Write all episodes of a run to a file; returns their number.

    Args:
        run: The run's folder, finished or not.
        out: A new file, ``….jsonl`` or ``….parquet``.

    Raises:
        RagenError: There is no run, the file exists, has another suffix or cannot be written, or
            pyarrow is missing.
    """
    if out.suffix not in _WRITERS:
        raise RagenError(f"{out}: expected a name that ends in {' or '.join(_WRITERS)}")
    if out.exists():
        raise RagenError(f"{out} exists already; name a file that does not")
    with file_errors("write", out), whole_file(out) as temporary:
        return _WRITERS[out.suffix](_rows(run), temporary)


def _rows(run: Path) -> Iterator[Record]:
    for record in records(run):
        turns = [{name: turn[name] for name in TURN} for turn in record["turns"]]
        yield {name: record[name] for name in EPISODE} | {"turns": turns}


def _write_json_lines(rows: Iterator[Record], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
            count += 1
    return count


def _write_parquet(rows: Iterator[Record], path: Path) -> int:
    try:
        import pyarrow as arrow
        from pyarrow.parquet import ParquetWriter
    except ImportError:
        raise RagenError(
            "writing Parquet needs pyarrow: pip install 'ragen-rl[parquet]', or name a .jsonl file"
        ) from None

    kinds = {
        "text": arrow.string(),
        "texts": arrow.list_(arrow.string()),
        "bool": arrow.bool_(),
        "int32": arrow.int32(),
        "int32s": arrow.list_(arrow.int32()),
        "int64": arrow.int64(),
        "float64": arrow.float64(),
        "float32s": arrow.list_(arrow.float32()),
    }

    def fields(columns: dict[str, str]) -> list[Any]:
        return [arrow.field(name, kinds[kind]) for name, kind in columns.items()]

    turns = arrow.field("turns", arrow.list_(arrow.struct(fields(TURN))))
    schema = arrow.schema([*fields(EPISODE), turns])
    count = 0
    with ParquetWriter(path, schema, compression="zstd") as writer:
        while part := list(islice(rows, ROWS_AT_ONCE)):
            writer.write_table(arrow.Table.from_pylist(part, schema))
            count += len(part)
    return count


_WRITERS: dict[str, Callable[[Iterator[Record], Path], int]] = {
    ".jsonl": _write_json_lines,
    ".parquet": _write_parquet,
}
