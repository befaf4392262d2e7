"""Pictures in the viewer's answers, and in shared files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ragen.core.pictures import MARK, PLACE, Picture
from ragen.core.types import Episode
from ragen.storage.branches import Request, write_branches
from ragen.viewer.reading import Question, Runs
from ragen.viewer.server import ROUTES, Viewer
from ragen.viewer.share import key_of, share
from tests.pictured import form, patch, picture_run, play, seeing_chat, seen_episodes, setup_of
from tests.viewer.test_viewer_share import data_of


@pytest.fixture(scope="module")
def played() -> list[Episode]:
    return seen_episodes()


@pytest.fixture(scope="module")
def root(played: list[Episode], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``seen``, whose first episode has a branch."""
    run = picture_run(tmp_path_factory.mktemp("pictures") / "seen", played)
    branch = play(setup_of(), ["go</think><answer>Left</answer>"])
    write_branches(run, Request(1, 0, 0, 1, 1.0, 0), [branch], True, seeing_chat().text_of)
    return run.parent


def ask(root: Path, path: str, **query: object) -> Any:
    asked = Question(Runs(root), {"run": "seen"} | {k: str(v) for k, v in query.items()})
    return ROUTES[f"/api/{path}"](asked)


def hashes(*pictures: Picture) -> list[str]:
    return [picture.hash for picture in pictures]


def test_each_text_has_the_pictures_of_its_places(root: Path, played: list[Episode]) -> None:
    for number, episode in enumerate(played, 1):
        found = ask(root, "episode", episode=number)
        texts = [(found["final_observation"], found["final_pictures"])]
        texts += [(turn["observation"], turn["pictures"]) for turn in found["turns"]]
        assert all(text.count(PLACE) == len(pictures) for text, pictures in texts)
        shown = [len(turn.pictures) for turn in episode.turns]
        assert any(shown) and len(found["turns"]) == len(shown)
    first, broken, third, last, *_ = ask(root, "episode", episode=3)["turns"]
    assert (
        first["result_pictures"] == hashes(patch(1), patch(2)) and broken["result_pictures"] == []
    )
    assert third["pictures"] == hashes(patch(2)) and third["result_pictures"] == hashes(patch(3))
    assert last["pictures"] == hashes(patch(3))


def test_the_messages_of_an_endpoint_are_readable(root: Path) -> None:
    texts = json.dumps([turn["messages"] for turn in ask(root, "episode", episode=4)["turns"]])
    assert MARK in texts and "ufdd1" not in texts


@pytest.mark.parametrize(("episode", "source"), [(1, "trained"), (3, "turns")])
def test_tokens_name_the_runs_of_pictures(
    root: Path, played: list[Episode], episode: int, source: str
) -> None:
    found = ask(root, "tokens", episode=episode)
    assert found["source"] == source
    shown = []
    for sample in found["samples"]:
        runs = sample["pictures"]
        places = {place for start, end, _ in runs for place in range(start, end)}
        assert [n for n, each in enumerate(sample["ids"]) if each is None] == sorted(places)
        assert all(sample["texts"][place] == "" for place in places)
        shown += [hash for _, _, hash in runs]
        assert {end - start for start, end, _ in runs} <= {len(form(patch(1))) - 2, 4}
    turns = played[episode - 1].turns
    assert shown == hashes(*turns[-1].prompt.pictures)


def test_pictures_are_served_to_the_viewer_s_own_pages_alone(
    root: Path, played: list[Episode]
) -> None:
    viewer = Viewer(root, 80)
    client = TestClient(viewer.app, base_url="http://localhost:80")
    picture = played[0].turns[0].pictures[0]
    place = {"run": "seen", "hash": picture.hash}
    answer = client.get("/api/picture", params=place)
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert Picture.of_png(answer.content) == picture
    foreign = {"sec-fetch-site": "cross-site", "sec-fetch-dest": "image"}
    assert client.get("/api/picture", params=place, headers=foreign).status_code == 403
    for wrong in ({"hash": "0" * 32}, {"hash": "../../run.sqlite"}, {"run": "other"}, {"hash": ""}):
        assert client.get("/api/picture", params=place | wrong).status_code == 404
    branches = client.get("/api/branches", params={"run": "seen", "episode": 1}).json()
    (branch,) = branches["jobs"][0]["episodes"]
    for hash in (hash for turn in branch["turns"] for hash in turn["pictures"]):
        assert client.get("/api/picture", params=place | {"hash": hash}).status_code == 200


def test_a_shared_file_holds_the_pictures_of_its_episodes(
    root: Path, tmp_path: Path, played: list[Episode]
) -> None:
    data = data_of(share(root / "seen", tmp_path / "a.html", group=3).read_text("utf-8"))
    held = {key for key in data if key.startswith("/api/picture?")}
    episode = played[2]
    shown = {*episode.final_pictures}.union(*(turn.pictures for turn in episode.turns))
    assert held == {key_of("/api/picture", {"run": "seen", "hash": e.hash}) for e in shown}
    for key in held:
        kind, png = data[key].split(",")
        assert kind == "data:image/png;base64"
        assert Picture.of_png(base64.b64decode(png)).hash in key
