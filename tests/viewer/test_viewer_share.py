"""A shared file: one self-contained page without foreign scripts or traces of this machine."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import socket
import sqlite3
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from records import episode, turn

from ragen.cli.main import main
from ragen.config.reading import dump, merge
from ragen.core.errors import RagenError
from ragen.core.metrics import last
from ragen.core.types import Group
from ragen.storage.database import DATABASE, new_run_folder
from ragen.storage.recorder import Recorder
from ragen.viewer import bundle
from ragen.viewer.share import Anonymizer, key_of, share
from tests.limits import largest_file
from tests.shared import own

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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model writes attacks, in a folder with a space in its path. Read only."""
    place = tmp_path_factory.mktemp("shared")
    folder = new_run_folder(place / "my runs", "made")
    config = merge("bandit", {"env.name": f"{place}/secret place/w.py:World"})
    with Recorder.create(folder, dump(config)) as recorder:
        recorder.log(1, {"reward/mean": last(1.0), "success/mean": last(0.5)})
        recorder.event(1, "alarm", f"see {folder}/checkpoints and /home/alice/x.log", {"a": 1})
        groups = [_hostile_group(number) for number in range(2)]
        recorder.episodes(1, groups)
        for step in (1, 2):
            recorder.episodes(step, [_hostile_group(7)], phase="eval")
            recorder.log(step, {"reward/mean": last(1.0)})
            recorder.cross_scores(step, "first", [[-1.0]], [0], [ATTACKS[0]], ["x"])
    with closing(sqlite3.connect(folder / DATABASE)) as connection, connection:
        connection.execute("UPDATE episodes SET env = ?", (f"{place}/w.py:World",))
    return folder


@pytest.fixture(scope="module")
def texts(run: Path) -> dict[str, str]:
    """The files of the run, of an episode and of a group."""
    selections: dict[str, dict[str, int]] = {"run": {}, "episode": {"episode": 2}}
    selections["group"] = {"group": 3}
    return {
        kind: share(run, run.parent / f"{kind}.html", **selection).read_text("utf-8")
        for kind, selection in selections.items()
    }


each_kind = pytest.mark.parametrize("kind", ["run", "episode", "group"])


def _hostile_group(number: int) -> Group:
    turns = [replace(turn(thought=f"{attack} says it"), observation=attack) for attack in ATTACKS]
    error = f'File "{Path(__file__)}", line 3\nValueError: {socket.gethostname()}'
    episodes = [replace(episode(*turns), group=number, member=m, error=error) for m in range(2)]
    return Group(tuple(episodes))


class Elements(HTMLParser):
    """The scripts and styles of a page with their contents, and all attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.inside = tag in ("script", "style")
        if self.inside:
            self.elements.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            tag, attributes, text = self.elements[-1]
            self.elements[-1] = (tag, attributes, text + data)


def data_of(text: str) -> dict[str, Any]:
    ((_, _, data),) = (
        each for each in Elements(text).elements if each[1].get("id") == "ragen-data"
    )
    parsed: dict[str, Any] = json.loads(data)
    return parsed


# ---- one page


@each_kind
def test_a_file_loads_nothing_and_executes_only_its_own_scripts(
    texts: dict[str, str], kind: str
) -> None:
    page = Elements(texts[kind])
    policy = next(value for _, _, value in page.attributes if (value or "").startswith("default"))
    assert policy is not None and "'unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    for tag, attributes, text in page.elements:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        executed = tag == "style" or attributes.get("type", "module") == "module"
        assert (f"'sha256-{digest}'" in policy) == executed
        assert "src" not in attributes
    assert [each for each in page.attributes if each[1].startswith("on")] == []
    links = [value or "" for _, name, value in page.attributes if name in ("href", "src")]
    assert all(link.startswith("data:image/") for link in links)
    assert "connect-src" not in policy  # So default-src forbids all connections.


def test_texts_of_models_are_embedded_as_data(texts: dict[str, str]) -> None:
    text = texts["episode"]
    turns = data_of(text)["/api/episode?episode=2&run=made-1"]["turns"]
    kept = [attack.replace("\x00", "") for attack in ATTACKS]
    assert [each["observation"].replace("\x00", "") for each in turns] == kept
    script = text[text.index('id="ragen-data"') : text.index("licences")]
    # The end tag of the element and the start tag of the next one.
    assert script.count("<") == 2 and "<!--" not in script
    assert script.isascii()


def test_embedded_json_cannot_end_its_element() -> None:
    for attack in ATTACKS:
        text = bundle.embedded({"a": attack})
        assert not set("<>&\u2028\u2029\u202e") & set(text)
        assert json.loads(text) == {"a": attack}


# ---- contents


def test_the_files_hold_their_answers(texts: dict[str, str]) -> None:
    run, episode, group = (data_of(texts[kind]) for kind in ("run", "episode", "group"))
    asked = {"/api/run?", "/api/episode?episode=2&", "/api/tokens?episode=2&"}
    assert set(episode) == {f"{each}run=made-1" for each in asked}
    assert 'data-start="#/episode/made-1/2"' in texts["episode"]

    found = group["/api/group?attempt=0&group=1&phase=train&run=made-1&step=1"]
    assert [each["id"] for each in found["episodes"]] == [3, 4]
    assert {f"/api/episode?episode={number}&run=made-1" for number in (3, 4)} <= set(group)

    pages = html.unescape(texts["run"].split('data-pages="')[1].split('"')[0]).split()
    assert pages == [f"#/{page}/made-1" for page in ("run", "evaluations", "collapse", "levels")]
    assert set(run["/api/metrics?run=made-1"]["names"]) == {"reward/mean", "success/mean"}
    assert [each["step"] for each in run["/api/collapse?run=made-1"]["matrix_steps"]] == [1, 2]
    assert all(f"/api/matrix?path=first&run=made-1&step={step}" in run for step in (1, 2))
    (level,) = run["/api/levels?run=made-1"]["levels"]
    place = f"env=w.py%3AWorld&level_seed={level['level_seed']}&phase=eval"
    played = run[f"/api/level?{place}&run=made-1"]["episodes"]
    assert {each["env"] for each in (level, *played)} == {"w.py:World"}
    assert {each["step"] for each in played} == {1, 2}


def test_keys_equal_those_of_the_front_end() -> None:
    assert key_of("/api/runs", {}) == "/api/runs"
    # As encodeURIComponent: these are unchanged, and any other character becomes %XX of its UTF-8.
    assert key_of("/a", {"q": "-_.!~*'()", "b": None}) == "/a?q=-_.!~*'()"
    assert key_of("/a", {"z": "ä/ &", "a": 1}) == "/a?a=1&z=%C3%A4%2F%20%26"


# ---- anonymity


@each_kind
def test_a_file_reveals_nothing_about_this_machine(
    run: Path, texts: dict[str, str], kind: str
) -> None:
    text = texts[kind]
    for secret in (
        run.parent.parent,
        Path(__file__).parent,
        Path.home(),
        "/home/alice",
        "secret place",
    ):
        assert str(secret) not in text
    assert socket.gethostname() not in text
    assert "World" in text  # The name of the environment is kept.


def test_paths_are_shortened_outside_texts_of_models() -> None:
    anonymizer = Anonymizer(Path("/data/my runs/a"))
    anonymized = anonymizer.anonymized(
        {
            "thought": "look at /etc/passwd on http://evil",
            "error": 'File "/srv/my code/x.py", line 3: /usr/lib/y.py',
            "events": [{"text": "in /data/my runs/a", "data": {"path": "C:\\Users\\me\\y"}}],
            "config": {"model.path": "/data/my runs/b/model", "lr": 0.1, "model": "Qwen/Qwen2"},
            "reason": "step-1 at http://gpu7:80/v1, C:\\Users\\me\\w.py:Environment, /home/me",
        }
    )
    assert anonymized == {
        "thought": "look at /etc/passwd on http://evil",
        "error": 'File "x.py", line 3: y.py',
        "events": [{"text": "in a", "data": {"path": "y"}}],
        "config": {"model.path": "model", "lr": 0.1, "model": "Qwen/Qwen2"},
        "reason": "step-1 at http://…/v1, w.py:Environment, ~",
    }


# ---- the command


def test_export_writes_a_file_and_never_overwrites_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.html"
    assert main(["view", str(run), "--export", str(out), "--episode", "1"]) == 0
    assert f"{out}" in capsys.readouterr().out
    before = out.read_bytes()
    assert main(["view", str(run), "--export", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_mistakes_are_refused_and_leave_no_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "x.html")
    for arguments, message in (
        ([str(run), "--export", out, "--episode", "1", "--group", "1"], "leave the other out"),
        ([str(run), "--export", out, "--episode", "999"], "there is no episode 999"),
        ([str(tmp_path), "--export", out], "no run"),
        (["--episode", "3"], "--export"),
    ):
        assert main(["view", *arguments]) == 2
        assert message in capsys.readouterr().err
    with largest_file(100_000), pytest.raises(RagenError, match="cannot write"):
        share(run, Path(out), episode=1)
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_another_schema_is_refused(run: Path, tmp_path: Path) -> None:
    other = own(run, tmp_path)
    with closing(sqlite3.connect(other / DATABASE)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(RagenError, match="schema 99"):
        share(other, tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


# ---- modules as one script


def bundle_of(folder: Path, **modules: str) -> str:
    for name, text in modules.items():
        (folder / f"{name}.js").write_text(text, encoding="utf-8")
    return bundle.bundle(folder / "app.js")


def test_modules_become_functions_in_the_order_of_their_imports(tmp_path: Path) -> None:
    script = bundle_of(
        tmp_path,
        app='import { two as second, three } from "./b.js";\nimport { four } from "./c.js";\n'
        'const later = () => import("./d.js");\n',
        b="function one() {}\nconst two = 2;\nexport const three = 3;\n"
        "export { two, one as default };\n",
        c='import { default as one } from "./b.js";\nexport async function four() {}\n',
        d="export function five() {}",
    )
    assert re.findall(r"^// (\w)", script, re.M) == ["b", "c", "d", "a"]
    assert "const { two: second, three } = module_0;" in script
    assert "const { default: one } = module_0;" in script
    assert "const { four } = module_1;" in script
    assert "Promise.resolve(module_2)" in script
    assert "return { three: three, two: two, default: one };" in script
    assert "return { four: four };" in script and "return { five: five };" in script
    assert not re.search(r"^(import|export)", script, re.M)


def test_the_front_end_is_bundled_with_its_licences() -> None:
    text = bundle.page("a < b", {}, "#/", "#/")
    assert "<title>a &lt; b</title>" in text
    for page in (bundle.STATIC / "pages").glob("*.js"):
        assert f"// {page.name}\n" in text
    assert "Permission is hereby granted" in text and "Apache License" in text
