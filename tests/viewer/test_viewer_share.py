"""A shared file: one page that needs nothing, says nothing of this machine, executes nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import resource
import socket
import sqlite3
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from records import episode, turn

from ragen.cli.main import main
from ragen.config.reading import dump, resolve
from ragen.core.errors import RagenError
from ragen.core.metrics import last
from ragen.core.types import Group
from ragen.storage.database import DATABASE, new_run_folder
from ragen.storage.recorder import Recorder
from ragen.viewer import bundle
from ragen.viewer.share import Anonymizer, _shorten, key_of, share

ATTACKS = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "&lt;script&gt;",
    "\u2028alert(1)//\u2029",
    "\u202eright to left",
    "]]>\x00\x1b[31m",
)


each_kind = pytest.mark.parametrize(
    "what", [{}, {"episode": 1}, {"group": 2}], ids=["run", "episode", "group"]
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose model writes attacks, under a folder with a blank in its path."""
    folder = new_run_folder(tmp_path / "my runs", "made")
    config = resolve("bandit", {"env.name": f"{tmp_path}/secret place/w.py:World"})
    with Recorder.create(folder, dump(config)) as recorder:
        recorder.log(1, {"reward/mean": last(1.0), "success/mean": last(0.5)})
        recorder.event(1, "alarm", f"see {folder}/checkpoints and /home/alice/x.log", {"a": 1})
        groups = [_group(number) for number in range(2)]
        recorder.episodes(1, groups)
        for step in (1, 2):
            recorder.episodes(step, [_group(7)], phase="eval")
            recorder.log(step, {"reward/mean": last(1.0)})
            recorder.cross_scores(step, "first", [[-1.0]], [0], [ATTACKS[0]], ["x"])
    return folder


def _group(number: int) -> Group:
    turns = [replace(turn(thought=f"{attack} says it"), observation=attack) for attack in ATTACKS]
    error = f'File "{Path(__file__)}", line 3\nValueError: {socket.gethostname()}'
    made = [replace(episode(*turns), group=number, member=m, error=error) for m in range(2)]
    return Group(tuple(made))


class Elements(HTMLParser):
    """The scripts and styles of a page with their texts, and all attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.inside = tag in ("script", "style")
        if self.inside:
            self.found.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)


def shared(run: Path, **what: int) -> str:
    return share(run, run.parent / "shared.html", **what).read_text("utf-8")


def data_of(text: str) -> dict[str, Any]:
    ((_, _, data),) = (each for each in Elements(text).found if each[1].get("id") == "ragen-data")
    found: dict[str, Any] = json.loads(data)
    return found


# ---- one page


@pytest.mark.parametrize(
    "what", [{}, {"episode": 1}, {"group": 2}], ids=["run", "episode", "group"]
)
def test_a_file_fetches_nothing_and_runs_only_our_scripts(run: Path, what: dict[str, int]) -> None:
    page = Elements(shared(run, **what))
    policy = next(value for _, _, value in page.attributes if (value or "").startswith("default"))
    assert policy is not None and "'unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    for tag, attributes, text in page.found:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        executed = tag == "style" or attributes.get("type", "module") == "module"
        assert (f"'sha256-{digest}'" in policy) == executed
        assert "src" not in attributes
    assert [each for each in page.attributes if each[1].startswith("on")] == []
    links = [value or "" for _, name, value in page.attributes if name in ("href", "src")]
    assert all(link.startswith("data:image/") for link in links)
    assert "connect-src" not in policy  # so that default-src forbids all of it


def test_what_models_wrote_stays_text(run: Path) -> None:
    text = shared(run, episode=1)
    data = data_of(text)
    turns = data["/api/episode?episode=1&run=made-1"]["turns"]
    kept = [attack.replace("\x00", "") for attack in ATTACKS]
    assert [each["observation"].replace("\x00", "") for each in turns] == kept
    script = text[text.index('id="ragen-data"') : text.index("licences")]
    assert script.count("<") == 2 and "<!--" not in script  # its own end, and the next one's begin
    assert script.isascii()


def test_embedded_json_cannot_end_its_element() -> None:
    for attack in ATTACKS:
        text = bundle.embedded({"a": attack})
        assert not set("<>&\u2028\u2029\u202e") & set(text)
        assert json.loads(text) == {"a": attack}


# ---- what it holds


def test_an_episode_s_file(run: Path) -> None:
    text = shared(run, episode=2)
    data = data_of(text)
    assert set(data) == {
        "/api/run?run=made-1",
        "/api/episode?episode=2&run=made-1",
        "/api/tokens?episode=2&run=made-1",
    }
    assert 'data-start="#/episode/made-1/2"' in text


def test_a_group_s_file_has_its_members(run: Path) -> None:
    data = data_of(shared(run, group=3))
    group = data["/api/group?attempt=0&group=1&phase=train&run=made-1&step=1"]
    members = [each["id"] for each in group["episodes"]]
    assert members == [3, 4]
    assert {f"/api/episode?episode={number}&run=made-1" for number in members} <= set(data)


def test_a_run_s_file_has_its_pages(run: Path) -> None:
    text = shared(run)
    data = data_of(text)
    pages = html.unescape(text.split('data-pages="')[1].split('"')[0]).split()
    assert pages == [f"#/{page}/made-1" for page in ("run", "evaluations", "collapse", "levels")]
    curves = data["/api/metrics?run=made-1"]["names"]
    assert set(curves) == {"reward/mean", "success/mean"}
    collapse = data["/api/collapse?run=made-1"]
    assert [each["step"] for each in collapse["matrix_steps"]] == [1, 2]
    assert all(f"/api/matrix?path=first&run=made-1&step={step}" in data for step in (1, 2))
    (level,) = data["/api/levels?run=made-1"]["levels"]
    assert f"/api/level?level_seed={level['level_seed']}&phase=eval&run=made-1" in data


def test_a_file_that_holds_a_part_says_of_how_much() -> None:
    levels = [{"phase": phase, "level": n} for phase in ("eval", "eval greedy") for n in range(5)]
    found = {"levels": [*levels, {"phase": "of one", "level": 0}]}
    _shorten(found, "levels", "phase", 3)
    assert [each["level"] for each in found["levels"]] == [0, 2, 4, 0, 2, 4, 0]
    assert found["all"] == {"eval": 5, "eval greedy": 5, "of one": 1}


def test_keys_are_those_of_the_front_end() -> None:
    assert key_of("/api/runs", {}) == "/api/runs"
    # As encodeURIComponent: these stay, all else is %XX of its UTF-8.
    assert key_of("/a", {"q": "-_.!~*'()", "b": None}) == "/a?q=-_.!~*'()"
    assert key_of("/a", {"z": "ä/ &", "a": 1}) == "/a?a=1&z=%C3%A4%2F%20%26"


# ---- safe to mail


@pytest.mark.parametrize(
    "what", [{}, {"episode": 1}, {"group": 2}], ids=["run", "episode", "group"]
)
def test_a_file_tells_nothing_of_this_machine(run: Path, what: dict[str, int]) -> None:
    text = shared(run, **what)
    for secret in (run.parent, Path(__file__).parent, Path.home(), "/home/alice", "secret place"):
        assert str(secret) not in text
    assert socket.gethostname() not in text
    assert "World" in text  # the name of the environment itself is told


def test_places_are_taken_out_of_our_words_alone() -> None:
    anonymizer = Anonymizer(Path("/data/my runs/a"))
    found = anonymizer.anonymized(
        {
            "thought": "look at /etc/passwd on http://evil",
            "error": 'File "/srv/my code/x.py", line 3: /usr/lib/y.py',
            "events": [{"text": "in /data/my runs/a", "data": {"path": "C:\\Users\\me\\y"}}],
            "config": {"model.path": "/data/my runs/b/model", "lr": 0.1, "model": "Qwen/Qwen2"},
        }
    )
    assert found == {
        "thought": "look at /etc/passwd on http://evil",
        "error": 'File "x.py", line 3: y.py',
        "events": [{"text": "in a", "data": {"path": "y"}}],
        "config": {"model.path": "model", "lr": 0.1, "model": "Qwen/Qwen2"},
    }


# ---- the command


def test_the_command_writes_and_never_overwrites(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run.parent / "x.html"
    assert main(["view", str(run), "--export", str(out), "--episode", "1"]) == 0
    assert f"{out}" in capsys.readouterr().out
    before = out.read_bytes()
    assert main(["view", str(run), "--export", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--episode", "1", "--group", "1"], "leave the other out"),
        (["--episode", "999"], "there is no episode 999"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_file(
    run: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run.parent / "x.html"
    assert main(["view", str(run), "--export", str(out), *options]) == 2
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_no_run_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path), "--export", str(tmp_path / "x.html")]) == 2
    assert "no run" in capsys.readouterr().err
    assert main(["view", "--episode", "3"]) == 2
    assert "--export" in capsys.readouterr().err


def test_a_full_disk_leaves_no_half_file(run: Path) -> None:
    out = run.parent / "x.html"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(RagenError, match="cannot write"):
            share(run, out, episode=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not out.exists()


def test_a_run_of_another_schema_is_one_line(run: Path) -> None:
    connection = sqlite3.connect(run / DATABASE)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(RagenError, match="schema 99"):
        share(run, run.parent / "x.html")
    assert not (run.parent / "x.html").exists()


# ---- modules as one script


def written(folder: Path, **modules: str) -> str:
    for name, text in modules.items():
        (folder / f"{name}.js").write_text(text, encoding="utf-8")
    return bundle.bundle(folder / "app.js")


def test_modules_become_functions_in_their_order(tmp_path: Path) -> None:
    found = written(
        tmp_path,
        app='import { two as second, three } from "./b.js";\nimport { four } from "./c.js";\n'
        'const later = () => import("./d.js");\n',
        b="export default function one() {}\nconst two = 2;\nexport const three = 3;\n"
        "export { two };\n",
        c='import one from "./b.js";\nexport async function four() {}\n',
        d="export class Five {}",
    )
    assert re.findall(r"^// (\w)", found, re.M) == ["b", "c", "d", "a"]
    assert "const { two: second, three } = module_0;" in found
    assert "const { default: one } = module_0;" in found
    assert "const { four } = module_1;" in found
    assert "Promise.resolve(module_2)" in found
    assert "return { default: one, three: three, two: two };" in found
    assert "return { four: four };" in found and "return { Five: Five };" in found
    assert not re.search(r"^(import|export)", found, re.M)


@pytest.mark.parametrize(
    "text",
    [
        *("export let x = 1;", 'export * from "./b.js";', 'import * as b from "./b.js";'),
        *('import "./b.js";', "import(`./${name}.js`);"),
    ],
)
def test_what_cannot_be_bundled_stops(tmp_path: Path, text: str) -> None:
    with pytest.raises(AssertionError, match="a form that a shared file cannot have"):
        written(tmp_path, app=text)


def test_a_circle_stops(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="imports itself"):
        written(tmp_path, app='import b from "./b.js";', b='import a from "./app.js";')


def test_the_whole_front_end_can_be_bundled_with_its_licences() -> None:
    text = bundle.page("a < b", {}, "#/", "#/")
    assert "<title>a &lt; b</title>" in text
    for page in (bundle.STATIC / "pages").glob("*.js"):
        assert f"// {page.name}\n" in text
    assert "Permission is hereby granted" in text and "Apache License" in text
