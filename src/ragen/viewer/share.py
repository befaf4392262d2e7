"""`ragen view --export`: an episode, a group or a run as one HTML file that needs no server.

The file holds the front end and the answers that its pages need. It can be mailed: it reveals
nothing about this machine but the name of the run's folder. Paths are cut to their last part;
addresses of servers and the name of the machine are removed. Texts of the model and the environment
are not changed.
"""

from __future__ import annotations

import base64
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from ragen.core.errors import RagenError
from ragen.core.files import file_errors, whole_file
from ragen.viewer.bundle import page
from ragen.viewer.episode_page import picture
from ragen.viewer.phrases import spread
from ragen.viewer.reading import Answer, Question, Runs
from ragen.viewer.server import ROUTES, finite

MOST_MATRICES, MOST_LEVELS = 8, 12
"""Steps of cross-scores (by path) and levels (by phase) in a run's file, evenly over all."""

PHRASE_LENGTHS = (3, 5, 8)
"""The lengths that the page offers (`static/phrases.js`)."""

UNRESERVED = "!'()*-._~"
"""The characters that JavaScript's `encodeURIComponent` keeps besides letters and digits."""

OUR_TEXTS = frozenset(
    {
        "config",
        "differences",
        "events",
        "last_event",
        "evaluations",
        "env",
        "model",
        "recipe",
        "error",
        "problem",
        "reason",
    }
)
"""Keys of texts that this program or Python wrote, which may contain paths of this machine."""

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


def share(run: Path, out: Path, *, episode: int | None = None, group: int | None = None) -> Path:
    """Write an episode, a group or the pages of a run into a new file.

    `group` is the id of any episode of the group. Without either, the run is shared: its curves,
    evaluations, collapse page and levels then and now. The run may be in progress.
    """
    if episode is not None and group is not None:
        raise RagenError("--episode and --group: a file shares one of them; leave the other out")
    if out.exists():
        raise RagenError(
            f"{out} exists already and is never overwritten; choose another file with --export"
        )
    held = _Held(run.resolve())
    if episode is not None:
        held.episode(episode)
        start = held.pages[0]
    else:
        start = held.whole_run() if group is None else held.group(group)
    text = page(f"{held.run} · RAGEN", held.anonymized(), start, " ".join(held.pages))
    with file_errors("write", out, "choose another place"), whole_file(out) as temporary:
        temporary.write_text(text, "utf-8")
    return out


class _Held:
    """The contents of a file: answers by key, and the addresses of the pages that they support.

    The root is the parent of the run's folder, so that the run's id is the name of its folder.
    """

    def __init__(self, folder: Path) -> None:
        self.runs, self.run = Runs(folder.parent), folder.name
        self.name = quote(folder.name, safe=UNRESERVED)
        self.pages: list[str] = []
        self.answers: Answer = {}
        self._anonymizer = Anonymizer(folder)
        self.about_run = self.ask("/api/run")

    def ask(self, question: str, /, **params: Any) -> Any:
        """The answer to a request about the run, which is added to the file.

        It still has the run's texts, because a later request may need them.
        """
        query = {"run": self.run} | {name: str(value) for name, value in params.items()}
        found = finite(ROUTES[question](Question(self.runs, query)))
        # All curves are one answer, whichever of them a page requests (`static/api.js`).
        held = {"run": self.run} if question == "/api/metrics" else query
        # The page asks with the texts that it got.
        self.answers[key_of(question, self._anonymizer.anonymized(held))] = found
        for each in _pictures(found):
            place = {"run": self.run, "hash": each}
            png = base64.b64encode(picture(Question(self.runs, place))).decode()
            self.answers[key_of("/api/picture", place)] = f"data:image/png;base64,{png}"
        return found

    def anonymized(self) -> Answer:
        """The answers without references to this machine."""
        found: Answer = self._anonymizer.anonymized(self.answers)
        return found

    def episode(self, number: int) -> None:
        """An episode with its tokens."""
        self.pages.append(f"#/episode/{self.name}/{number}")
        if self.ask("/api/episode", episode=number)["has_tokens"]:
            self.ask("/api/tokens", episode=number)

    def group(self, member: int) -> str:
        """A group side by side, and each of its episodes; the group's address."""
        first = self.ask("/api/episode", episode=member)
        place = {name: first[name] for name in ("attempt", "step", "phase", "group")}
        self.pages.append(f"#/group/{self.name}")
        for each in self.ask("/api/group", **place)["episodes"]:
            self.episode(each["id"])
        return f"{self.pages[0]}?{_encoded(place)}"

    def whole_run(self) -> str:
        """Curves, evaluations, collapse, and some levels then and now; the run's address."""
        pages = ("run", "evaluations", "collapse", "levels")
        self.pages += [f"#/{page}/{self.name}" for page in pages]
        self.ask("/api/metrics", names=",".join(self.about_run["names"]))
        self.ask("/api/compare")
        for words in PHRASE_LENGTHS:
            self.ask("/api/phrases", words=words, phase="train")
        collapse = self.ask("/api/collapse")
        _shorten(collapse, "matrix_steps", "path", MOST_MATRICES)
        for each in collapse["matrix_steps"]:
            self.ask("/api/matrix", step=each["step"], path=each["path"])
        levels = self.ask("/api/levels")
        _shorten(levels, "levels", "phase", MOST_LEVELS)
        for each in levels["levels"]:
            place = {name: each[name] for name in ("phase", "env", "level_seed")}
            self.ask("/api/level", **place)
        return self.pages[0]


def _shorten(found: Answer, name: str, kind: str, most: int) -> None:
    """Keep at most `most` of each kind, evenly spaced; ``all`` has the number of each kind."""
    alike: dict[str, list[Answer]] = {}
    for each in found[name]:
        alike.setdefault(each[kind], []).append(each)
    found["all"] = {one: len(those) for one, those in alike.items()}
    found[name] = [each for those in alike.values() for each in spread(those, most)]


def _pictures(found: Any) -> Iterator[str]:
    """The hashes of the pictures in an answer about episodes."""
    for each in found.values() if isinstance(found, dict) else found:
        if isinstance(each, dict | list):
            yield from _pictures(each)
    if isinstance(found, dict):
        for name in ("pictures", "result_pictures", "final_pictures"):
            yield from (each for each in found.get(name, ()) if isinstance(each, str))


def key_of(path: str, params: Mapping[str, Any]) -> str:
    """The key of an answer, as `keyOf` of `static/api.js` makes it."""
    known = {name: params[name] for name in sorted(params) if params[name] not in (None, "")}
    return "?".join(filter(None, (path, _encoded(known))))


def _encoded(params: Mapping[str, Any]) -> str:
    return urlencode(params, safe=UNRESERVED, quote_via=quote)


class Anonymizer:
    """Removes references to this machine from answers.

    Only texts by this program or Python are changed. Those of models and environments are the
    content that is shared.
    """

    def __init__(self, folder: Path) -> None:
        self._known = {f"{folder}": folder.name, f"{folder.parent}/": "", f"{Path.home()}/": ""}
        self._host = re.compile(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w-])")

    def anonymized(self, value: Any, ours: bool = False) -> Any:
        """The value without references, in texts below `OUR_TEXTS` or where `ours` is set."""
        if isinstance(value, dict):
            return {
                name: self.anonymized(each, ours or name in OUR_TEXTS)
                for name, each in value.items()
            }
        if isinstance(value, list):
            return [self.anonymized(each, ours) for each in value]
        return self.text(value) if ours and isinstance(value, str) else value

    def text(self, text: str) -> str:
        r"""A text without paths, addresses and the machine's name."""
        # A text that is one path may contain spaces; within a sentence, a space ends a path.
        if _WHOLE.fullmatch(text):
            return re.split(r"[/\\]", text.rstrip("/\\"))[-1]
        for place, name in self._known.items():
            text = text.replace(place, name)
        for pattern, instead in _PLACES:
            text = pattern.sub(instead, text)
        return self._host.sub("host", text)
