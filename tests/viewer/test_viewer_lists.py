"""The list of episodes: filters, orders, pages, the search, and the indexes they read."""

from __future__ import annotations

import base64
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from viewer_run import THOUGHTS, make_run

from ragen.storage.database import DATABASE
from ragen.viewer.episode_list import SORTS, RowPosition, episodes, facets, selection_of
from ragen.viewer.reading import Question, Runs, Unanswered, reading
from ragen.viewer.search import match_of


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "lake").parent


def list_episodes(root: Path, **query: Any) -> dict[str, Any]:
    text_query = {name: str(value) for name, value in query.items()}
    return episodes(Question(Runs(root), {"run": "lake", **text_query}))


def ids(root: Path, **query: Any) -> list[int]:
    return [each["id"] for each in list_episodes(root, **{"limit": 200, **query})["episodes"]]


def test_a_list_has_episodes_total_and_facets(root: Path) -> None:
    answer = list_episodes(root)
    assert (answer["total"], answer["next"], len(answer["episodes"])) == (44, None, 44)
    assert answer["facets"] == {
        "phases": ["eval", "train"],
        "envs": ["frozen-lake"],
        "stop_reasons": ["max_turns", "solved"],
        "steps": [0, 6],
    }
    first = answer["episodes"][0]
    assert (first["id"], first["num_turns"], first["num_tokens"]) == (1, 2, 3)
    assert first["success"] is True and first["kept"] is True and first["terminated"] is True
    assert first["snippet"] == THOUGHTS[0]


def test_filters_select_the_matching_episodes(root: Path) -> None:
    filters: list[tuple[dict[str, Any], int, Callable[[dict[str, Any]], bool]]] = [
        ({"phase": "eval"}, 12, lambda e: e["phase"] == "eval"),
        ({"success": 1}, 11, lambda e: e["success"]),
        ({"success": 0}, 33, lambda e: not e["success"]),
        ({"step_from": 5, "step_to": 6}, 12, lambda e: e["step"] in (5, 6)),
        ({"reward_min": 0.5}, 11, lambda e: e["reward"] == 1.0),
        ({"reward_max": 0.5, "phase": "train"}, 24, lambda e: e["reward"] == 0.0),
        ({"stop_reason": "solved"}, 11, lambda e: e["stop_reason"] == "solved"),
        ({"kept": 0}, 16, lambda e: not e["kept"]),
        ({"alarm": 1}, 8, lambda e: (e["attempt"], e["step"]) == (0, 4)),
        ({"level_seed": 123}, 6, lambda e: e["level_seed"] == 123),
        ({"env": "sokoban"}, 0, lambda e: False),
        ({"group": 1, "step_to": 0}, 2, lambda e: e["group"] == 1),
        ({"phase": ""}, 44, lambda e: True),
    ]
    for query, count, matches in filters:
        answer = list_episodes(root, limit=200, **query)
        assert answer["total"] == len(answer["episodes"]) == count, query
        assert all(map(matches, answer["episodes"]))


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("sort", SORTS)
def test_pages_hold_each_episode_once_in_order(root: Path, sort: str, order: str) -> None:
    episodes, cursor = [], ""
    while cursor is not None:
        page = list_episodes(root, sort=sort, order=order, limit=7, cursor=cursor)
        episodes += page["episodes"]
        assert page["total"] == 44
        cursor = page["next"]
    assert sorted(each["id"] for each in episodes) == list(range(1, 45))
    values = [each[SORTS[sort]] for each in episodes]
    known = [value for value in values if value is not None]
    assert values == known + [None] * (len(values) - len(known)), (
        "episodes without a value are not last"
    )
    assert known == sorted(known, reverse=order == "desc")
    assert sort != "score" or len(known) == 16


def test_the_next_page_continues_after_the_last_row_when_the_order_changes(tmp_path: Path) -> None:
    """A page starts after a row; with an offset, rows that move would be listed twice."""
    run = make_run(tmp_path / "lake")
    first = list_episodes(tmp_path, sort="reward", order="desc", limit=5)
    with sqlite3.connect(run / DATABASE) as connection:
        connection.execute("UPDATE episodes SET reward = 9 WHERE id = 44")
    second = list_episodes(tmp_path, sort="reward", order="desc", limit=5, cursor=first["next"])
    shown = [each["id"] for page in (first, second) for each in page["episodes"]]
    assert len(set(shown)) == 10


def test_the_search_finds_words_prefixes_and_phrases(root: Path) -> None:
    assert len(ids(root, q="box")) == 11
    assert len(ids(root, q="THE WALL")) == 11 and len(ids(root, q="under wal")) == 11
    assert len(ids(root, q='"the box"')) == 11 and ids(root, q='"box the"') == []
    assert len(ids(root, q="the")) == 22 and len(ids(root, q="box wall")) == 0
    assert ids(root, q="bo") == []  # Too short to be a prefix.
    assert len(ids(root, q="the", success=1)) == 11
    assert len(ids(root, q="  ")) == len(ids(root, q='"')) == 44
    snippet = list_episodes(root, q="left", group=1)["episodes"][0]["snippet"]
    assert snippet == THOUGHTS[2]


def test_the_episodes_of_a_search_are_counted_if_one_page_holds_them(root: Path) -> None:
    query = {"q": "the", "sort": "reward", "order": "desc"}
    whole = list_episodes(root, **query)
    assert whole["total"] == len(whole["episodes"]) == 22
    first = list_episodes(root, **query, limit=20)
    rest = list_episodes(root, **query, limit=20, cursor=first["next"])
    assert first["episodes"] + rest["episodes"] == whole["episodes"]
    assert first["total"] is rest["total"] is None


def test_a_run_is_read_only(root: Path) -> None:
    with reading(root / "lake") as run, pytest.raises(sqlite3.OperationalError, match="readonly"):
        run.connection.execute("DELETE FROM turns")


def test_a_snippet_is_cut_around_the_match(tmp_path: Path) -> None:
    run = make_run(tmp_path / "lake")
    thought = "a " * 500_000 + "needle " + "b " * 100
    with sqlite3.connect(run / DATABASE) as connection:
        connection.execute("UPDATE turns SET thought = ? WHERE id = 65536", (thought,))
        connection.execute("INSERT INTO thoughts_fts (thoughts_fts) VALUES ('rebuild')")
    (listed,) = list_episodes(tmp_path, q="needle")["episodes"]
    assert len(listed["snippet"]) <= 160 and "needle" in listed["snippet"]
    assert listed["snippet"].startswith("…") and listed["snippet"].endswith("…")


def test_operators_of_the_search_language_are_plain_text(root: Path) -> None:
    for text in (
        *('"', '""', '" "', "*", "a*", "a OR", "NOT", "NEAR(a b", "thought:x", "-x", "^a", "("),
        *("a\0b", "{a}:b", "'; DROP TABLE turns", "\ud800", "||", "é", "\u202e", "x" * 10_000),
    ):
        assert len(list_episodes(root, q=text)["episodes"]) in (0, 44)
    assert match_of('a "b c" d') == '"a" "b c" "d"'
    assert match_of("word ") == '"word"' and match_of("word") == '"word"*'
    assert match_of(" || ") is None


def test_lists_read_only_the_covering_index(root: Path) -> None:
    """A scan of the table would read every observation and error of a run."""
    plans = []

    def collect(query: str) -> None:
        if "episodes" in query and "turns" not in query:
            plans.append(query)

    with reading(root / "lake") as run:
        connection = run.connection
        connection.set_trace_callback(collect)
        facets(run)
        connection.set_trace_callback(None)
        for query in plans:
            steps = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
            assert any("COVERING INDEX" in step for step in steps)
            assert not any(")>(" in step for step in steps)  # That seeks by the first column only.
            assert not any(step.startswith("SCAN episodes") for step in steps[1:])
        filters = {"success": "1", "alarm": "1", "reward_min": "0"}
        for sort in SORTS:
            selection = selection_of(Question(Runs(root), {"sort": sort, **filters}))
            pages: list[str] = []
            connection.set_trace_callback(pages.append)
            selection.page(run, RowPosition(0.0, 1), 10)
            connection.set_trace_callback(None)
            (step, *_) = connection.execute(f"EXPLAIN QUERY PLAN {pages[0]}")
            assert "COVERING INDEX episodes_for_lists" in step[3]


def test_invalid_cursors_are_refused(root: Path) -> None:
    for cursor in ("x", "bnVsbA", "WzEsICJhIl0", "W1tdLCAxXQ", HUGE):
        with pytest.raises(Unanswered, match="not valid for this list"):
            list_episodes(root, cursor=cursor)


HUGE = base64.urlsafe_b64encode(b"[1, 1" + b"0" * 400 + b"]").decode()
"""An id that no database holds."""
