"""`ragen view --export`: an episode, a group or a run as one HTML file that needs no server.

The file holds the front end and the answers that its pages will ask for. It is made to be mailed:
of this machine it says nothing but the name of the run's folder. Paths become the last part of
theirs, addresses of servers and the machine's name are left out; what the model and the
environment wrote stays as it is, and stays text.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ragen.core.errors import RagenError
from ragen.viewer.bundle import page
from ragen.viewer.phrases import spread
from ragen.viewer.routes import answer
from ragen.viewer.server import finite

MOST_MATRICES, MOST_LEVELS = 8, 12
"""Steps of cross-scores a path, and levels a phase, that a run's file holds, evenly over all."""

PHRASE_LENGTHS = (3, 5, 8)
"""Those that the page offers (`static/phrases.js`)."""

TOLD_BY_US = frozenset(
    {
        *("config", "differences", "events", "last_event", "evaluations", "env", "model"),
        *("recipe", "error", "problem", "reason"),
    }
)
"""Keys under which this program or Python speaks, and may name places of this machine."""

_PART = r"""[^\s\\/'"`:,;()<>|\[\]{}]+"""
_ROOT = r"(?:~?/|[A-Za-z]:\\|\\\\)"
_WHOLE = re.compile(rf"{_ROOT}[^\n]*")
_QUOTED = re.compile(rf"""(?<=["'])(?={_ROOT})[^"'\n]*[/\\](?=[^"'\n/\\]*["'])""")
_HOME = re.compile(rf"(?<![\w.~/])/(?:home|Users)/{_PART}")
_FOLDERS = re.compile(
    rf"(?<![\w.~/])~?/(?:{_PART}/)+|(?<!\w)[A-Za-z]:\\(?:{_PART}\\)*"  # /usr/lib/, C:\Users\
)
_SERVER = re.compile(r"\b(https?|grpc|tcp)://[^\s/'\"`,;()<>]+")
_PLACES = ((_SERVER, r"\1://…"), (_QUOTED, ""), (_HOME, "~"), (_FOLDERS, ""))

Answers = dict[str, Any]


def share(run: Path, out: Path, *, episode: int | None = None, group: int | None = None) -> Path:
    """Write an episode, a group or a run's pages into a file.

    Args:
        run: The run's folder; it may go on meanwhile.
        out: A file that does not exist yet.
        episode: The number of the episode that is shared.
        group: The number of any episode of the group that is shared. Without either it is the run:
            its curves, evaluations, collapse page and recurring levels.

    Returns:
        The file.

    Raises:
        RagenError: There is no such run or episode, or the file exists or cannot be written.
    """
    if episode is not None and group is not None:
        raise RagenError("--episode and --group: one file shares one of them, leave the other out")
    if out.exists():
        raise RagenError(f"{out} exists already and is never overwritten; give another --export")
    folder = run.resolve()
    if episode is not None:
        held = _Held(folder, f"#/episode/{_encoded(folder.name)}/{episode}")
        held.episode(episode)
    elif group is not None:
        held = _group(folder, group)
    else:
        held = _run(folder)
    text = page(f"{folder.name} · RAGEN", held.answers, held.start, " ".join(held.pages))
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RagenError(f"{out} exists already; give another --export") from None
    except OSError as error:
        with suppress(OSError):
            out.unlink(missing_ok=True)  # half of it, if anything
        raise RagenError(f"cannot write {out}: {error.strerror}; choose another place") from None
    return out


class _Held:
    """What a file holds: answers by their keys, the pages they are enough for, the first of them.

    Runs are asked for below their own parent, so that their id is their folder's name.
    """

    def __init__(self, folder: Path, start: str) -> None:
        self.root, self.run, self.start = folder.parent, folder.name, start
        self.pages = [start.partition("?")[0]]
        self.answers: Answers = {}
        self._discreet = Discreet(folder)
        self.about_run = self.ask("/api/run")

    def ask(self, question: str, /, **params: Any) -> Any:
        """The answer to a question about the run, which the file then holds."""
        query = {"run": self.run} | {name: str(value) for name, value in params.items()}
        found = self._discreet.without_places(finite(answer(self.root, question, query)))
        # Of curves the file holds all under one key, whichever a page asks for (`static/api.js`).
        held = {"run": self.run} if question == "/api/metrics" else query
        self.answers[key_of(question, held)] = found
        return found

    def episode(self, number: int) -> Any:
        """An episode with its tokens."""
        found = self.ask("/api/episode", episode=number)
        if found["has_tokens"]:
            self.ask("/api/tokens", episode=number)
        return found


def _group(folder: Path, member: int) -> _Held:
    """A group side by side, and each of its episodes."""
    held = _Held(folder, "")
    first = held.episode(member)
    place = {name: first[name] for name in ("attempt", "step", "phase", "group")}
    found = held.ask("/api/group", **place)
    for each in found["episodes"]:
        held.episode(each["id"])
        held.pages.append(f"#/episode/{_encoded(held.run)}/{each['id']}")
    query = "&".join(f"{name}={_encoded(value)}" for name, value in place.items())
    held.pages[0] = f"#/group/{_encoded(held.run)}"
    held.start = f"{held.pages[0]}?{query}"
    return held


def _run(folder: Path) -> _Held:
    """A run's page, its evaluations, the collapse page, and some levels then and now."""
    name = _encoded(folder.name)
    held = _Held(folder, f"#/run/{name}")
    held.pages += [f"#/{page}/{name}" for page in ("evaluations", "collapse", "levels")]
    held.ask("/api/metrics", names=",".join(held.about_run["names"]))
    held.ask("/api/compare")
    for words in PHRASE_LENGTHS:
        held.ask("/api/phrases", words=words, phase="train")
    collapse = held.ask("/api/collapse")
    _shorten(collapse, "matrix_steps", "path", MOST_MATRICES)
    for each in collapse["matrix_steps"]:
        held.ask("/api/matrix", step=each["step"], path=each["path"])
    levels = held.ask("/api/levels")
    _shorten(levels, "levels", "phase", MOST_LEVELS)
    for each in levels["levels"]:
        held.ask("/api/level", phase=each["phase"], level_seed=each["level_seed"])
    return held


def _shorten(found: Answers, name: str, kind: str, most: int) -> None:
    """Keep of each kind at most so many, evenly; `all` then says how many of each there were."""
    alike: dict[str, list[Answers]] = {}
    for each in found[name]:
        alike.setdefault(each[kind], []).append(each)
    found["all"] = {one: len(those) for one, those in alike.items()}
    found[name] = [each for those in alike.values() for each in spread(those, most)]


def key_of(path: str, params: Mapping[str, Any]) -> str:
    """The key of an answer, as `keyOf` of `static/api.js` makes it.

    Example:
        >>> key_of("/api/level", {"run": "a b", "phase": "eval", "level_seed": 5})
        '/api/level?level_seed=5&phase=eval&run=a%20b'
    """
    known = {name: value for name, value in params.items() if value not in (None, "")}
    pairs = (f"{_encoded(name)}={_encoded(known[name])}" for name in sorted(known))
    return "?".join(filter(None, (path, "&".join(pairs))))


def _encoded(value: Any) -> str:
    """As JavaScript's `encodeURIComponent`."""
    return quote(str(value), safe="!'()*-._~")


class Discreet:
    """Takes what tells of this machine out of answers.

    Only below keys where this program or Python speaks: the text of models and environments is the
    matter itself, and would be another if parts of it were missing.
    """

    def __init__(self, folder: Path) -> None:
        """For the answers about one run, whose path may have blanks, as may that of the home."""
        self._known = {f"{folder}": folder.name, f"{folder.parent}/": "", f"{Path.home()}/": ""}
        self._host = re.compile(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w-])")

    def without_places(self, value: Any, ours: bool = False) -> Any:
        """The value, with all of it that is `ours` made discreet."""
        if isinstance(value, dict):
            return {
                name: self.without_places(each, ours or name in TOLD_BY_US)
                for name, each in value.items()
            }
        if isinstance(value, list):
            return [self.without_places(each, ours) for each in value]
        return self.text(value) if ours and isinstance(value, str) else value

    def text(self, text: str) -> str:
        r"""A text without places.

        Example:
            >>> discreet = Discreet(Path("/data/my runs/a"))
            >>> discreet.text("File '/usr/lib/x.py': /data/my runs/a/step-1 at http://gpu7:80/v1")
            "File 'x.py': a/step-1 at http://…/v1"
            >>> discreet.text("Qwen/Qwen2.5 reward/mean C:\\Users\\me\\w.py:Environment /home/me")
            'Qwen/Qwen2.5 reward/mean w.py:Environment ~'
        """
        if _WHOLE.fullmatch(text):  # may have blanks, where in a sentence one ends the path
            return re.split(r"[/\\]", text.rstrip("/\\"))[-1]
        for place, name in self._known.items():
            text = text.replace(place, name)
        for pattern, instead in _PLACES:
            text = pattern.sub(instead, text)
        return self._host.sub("host", text)
