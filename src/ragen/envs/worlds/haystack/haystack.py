"""Haystack: find one moment of a long film by a few looks (after arXiv:2504.02259)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from ragen.core.pictures import MARK
from ragen.envs.contract import Info, Options, Probability, Schema, State, fresh_seed, pick
from ragen.envs.tools import ToolEnv, ToolError, tool, write_call
from ragen.envs.worlds.haystack.film import COLOURS, FORMS, Film, agreement, evenly, generate
from ragen.envs.worlds.tiles import Layer, Pixels, draw

MOST_NAMED, MOST_SEEN = 8, 64
"""Maximum number of frames in an answer and in a look."""
INK = 0x202428
"""The colour of a form in a picture, unless it is the target and seen closely."""
RGB = {
    **{"white": 0xF4F4F4, "grey": 0x9AA0A6, "brown": 0x8A6242, "green": 0x58A868},
    **{"pink": 0xF2B8C6, "orange": 0xF0A040},
    **{"red": 0xD02020, "blue": 0x2050E0, "yellow": 0xF8E020, "purple": 0x8030A0},
}
SHAPES = {
    "disc": (("disc", 13, True),),
    "square": (("square", 11, True),),
    "diamond": (("diamond", 15, True),),
    "ring": (("disc", 14, True), ("disc", 8, False)),
    "box": (("square", 13, True), ("square", 8, False)),
    "star": (("square", 10, True), ("diamond", 15, True)),
}
"""The layers of a form and their radii; true has the colour of the form, false of the backdrop."""
Number = Annotated[int, Field(ge=0)]


class Haystack(ToolEnv):
    """Answer a question about one moment of a film that is too long to be seen whole.

    Scenes last for 20 to 60 frames, and forms pass through them. The target is seen in 3 frames, in
    a scene of the named backdrop, and the cue from 5 frames before to 5 frames after them.

    Observation:
        The question; then the frames of each look, with backdrop and forms. A look at many frames
        shows no colours, and it may miss or invent a form.

    Actions:
        Calls of the tools ``look`` and ``zoom``, or an answer: a colour and up to 8 frames of the
        moment, as in ``red 40 41``. Random play looks at 8 frames of the whole film, and
        then zooms in on one of them or looks at 8 between two. Once it has zoomed in, it begins
        again or answers: with this frame and a colour in it, or any colour if it has none.

    Reward:
        1 for the right colour, plus the temporal F1 of the named frames, where 5 frames off still
        count; minus `cost` for each frame seen.

    Ends when:
        A colour is answered: a success if it is right.

    Parameters:
        frames: The length of the film.
        budget: Maximum number of frames seen; a frame that is seen again counts again.
        cost: The price of a frame.
        noise: Probability that a look at many frames misses a form; it invents one that is not
            there with a tenth of it.
        observation: Frames in words, or as pictures.
        calls: Looks are tools, or they are words: ``look 0 599 8`` and ``zoom 40``.

    Example:
        >>> env = Haystack(frames=200)
        >>> print(env.reset(seed=123)[0])
        Frames 0 to 199. Which colour has the square in a brown scene near a star?
        red, blue, yellow, purple
        >>> print(env.step(write_call("look", start=0, end=199, n=3))[0])
        0 grey
        99 pink
        199 grey ring
        61 frames left
        >>> env.step("red 143")[1:3]
        (2.0, True)
    """

    name = "haystack"
    goal = "Find the moment"
    prompt_style = "paper"
    max_turns, actions_per_turn, max_actions = 10, 1, 10
    film: Film

    def __init__(
        self,
        frames: Annotated[int, Field(ge=200, le=5000)] = 600,
        budget: Annotated[int, Field(ge=1)] = 64,
        cost: Probability = 0.005,
        noise: Probability = 0.1,
        observation: Literal["text", "picture"] = "text",
        calls: Literal["tools", "words"] = "tools",
    ) -> None:
        self._level, self._budget, self._cost = (frames, noise), budget, cost
        self._in_pictures, self._in_words = observation == "picture", calls == "words"
        self.reset(seed=0)

    @property
    def rules(self) -> str:
        words = "`look START END N` and `zoom FRAME` are such looks.\n" if self._in_words else ""
        return (
            "A question asks about one moment of a film. A look at up to N frames, evenly spaced "
            "from START to END, may miss forms or show some that are not there, and shows no "
            "colours; zooming in on one frame shows it exactly. You may see "
            f"{self._budget} frames in all, and each costs {self._cost:g} points.\n{words}"
            f"Your answer is a colour and 1 to {MOST_NAMED} frames of the moment: red 40 41."
        )

    @property
    def tools(self) -> tuple[Schema, ...]:
        return () if self._in_words else super().tools

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        seed = fresh_seed() if seed is None else seed
        begun = {"seed": seed, "left": self._budget, "frames": [], "closely": False, "said": ""}
        self.set_state(begun)
        return self.film.question, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        left = self._left
        shown, reward, *ends = super().step(_as_call(action) if self._in_words else action)
        place = f"\n{MARK}" if self._in_pictures and self._frames else ""
        return f"{shown}{place}", reward - self._cost * (left - self._left), *ends

    @tool
    def look(self, start: Number, end: Number, n: Annotated[int, Field(ge=1, le=MOST_SEEN)]) -> str:
        """Show up to n frames of the film, evenly spaced from start to end."""
        if start > end:
            raise ToolError("start is after end")
        return self._see(evenly(start, end, n), closely=False)

    @tool
    def zoom(self, frame: Number) -> str:
        """Show one frame exactly and with its colours."""
        return self._see([frame], closely=True)

    def _see(self, frames: list[int], closely: bool) -> str:
        if frames[-1] >= len(self.film.shown):
            raise ToolError(f"the last frame is {len(self.film.shown) - 1}")
        if len(frames) > self._left:
            raise ToolError(f"you may see {self._left} more frames, not {len(frames)}")
        self._set_view(frames, closely)
        self._left -= len(frames)
        shown = f"Frames {' '.join(map(str, frames))}" if self._in_pictures else self._view
        return f"{shown}\n{self._left} frames left"

    def _set_view(self, frames: list[int], closely: bool) -> None:
        self._frames, self._closely = frames, closely
        self._view = "\n".join(self.film.describe(frame, closely) for frame in frames)

    def answer(self, text: str) -> tuple[str, float, bool, bool, Info]:
        colour, *words = text.split() or [""]
        named = _numbers(words)
        inside = 1 <= len(named) <= MOST_NAMED and max(named) < len(self.film.shown)
        if colour not in COLOURS or len(named) < len(words) or not inside:
            shown = f"Answer with a colour and 1 to {MOST_NAMED} frames, such as red 40 41."
            return shown, 0.0, False, False, {"success": False, "effective": False}
        self._said = " ".join([colour, *map(str, named)])
        right = colour == self.film.colour
        *_, f1 = agreement(named, self.film.moment)
        shown = f"{'Right' if right else 'Wrong'}, F1 {f1:.2f}"
        return shown, right + f1, True, False, {"success": right, "effective": True}

    def get_state(self) -> State:
        view = {"frames": list(self._frames), "closely": self._closely}
        return {"seed": self._seed, "left": self._left, "said": self._said, **view}

    def set_state(self, state: State) -> None:
        self._seed, self._left, self._said = state["seed"], state["left"], state["said"]
        self.film = generate(self._seed, *self._level)
        self._set_view(list(state["frames"]), state["closely"])

    def state_key(self) -> str:
        return f"{self.film.question}\n{self._view}\n{self._left} frames left {self._said}"

    @property
    def shows_pictures(self) -> bool:
        return self._in_pictures

    def pictures(self) -> Sequence[Pixels]:
        """One picture of all frames, from left to right, as many in a row as in a column.

        A frame has a dark edge and, in 2 rows of 3, a place for each form.
        """
        if not self._in_pictures or not self._frames:
            return []
        film, count, side = self.film, len(self._frames), 16 if self._closely else 8
        inks = {film.target: RGB[film.colour]} if self._closely else {}
        seen = [film.seen(frame, self._closely) for frame in self._frames]
        tiles = [
            [_tile(form in words and form, inks.get(form, INK), words[0], side) for form in FORMS]
            for words in seen
        ]
        apart = np.reshape(tiles, (count, 2, 3, side, side, 3)).swapaxes(2, 3)
        columns = int(np.ceil(count**0.5))
        edges = (0, -count % columns), (1, 1), (1, 1), (0, 0)
        cells = np.pad(apart.reshape(count, 2 * side, 3 * side, 3), edges)
        rows = cells.reshape(-1, columns, *cells.shape[1:]).swapaxes(1, 2)
        return [rows.reshape(-1, columns * cells.shape[2], 3)]

    def random_action(self, generator: np.random.Generator) -> str:
        frames, half = self._frames, generator.random() < 0.5
        if self._closely and half:
            seen = [colour for colour in COLOURS if f" {colour} " in self._view]
            return f"{pick(generator, seen or COLOURS)} {frames[0]}"
        if len(frames) < 2 or self._closely:
            return self._write("look", start=0, end=len(self.film.shown) - 1, n=8)
        if half:
            return self._write("zoom", frame=pick(generator, frames))
        place = pick(generator, range(len(frames) - 1))
        return self._write("look", start=frames[place], end=frames[place + 1], n=8)

    def _write(self, name: str, **numbers: int) -> str:
        words = " ".join([name, *map(str, numbers.values())])
        return words if self._in_words else write_call(name, **numbers)

    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str]:
        return [" ".join([self.film.colour, *map(str, self.film.moment)])]


def _as_call(action: str) -> str:
    """The call that words such as ``zoom 40`` stand for; any other text stays as it is."""
    name, *words = action.split() or [""]
    parameters = {"look": ("start", "end", "n"), "zoom": ("frame",)}.get(name, ())
    if 0 < len(parameters) == len(words) == len(numbers := _numbers(words)):
        return write_call(name, **dict(zip(parameters, numbers, strict=True)))
    return action


def _numbers(words: Sequence[str]) -> list[int]:
    return [int(word) for word in words if word.isdecimal() and len(word) <= 4]


@cache
def _tile(form: str | Literal[False], ink: int, backdrop: str, side: Any) -> Pixels:
    behind, shapes = RGB[backdrop], SHAPES[form] if form else ()
    layers: list[Layer] = [(shape, radius, ink if own else behind) for shape, radius, own in shapes]
    tile: Pixels = draw([[("square", 16, behind), *layers]], side)[0]
    return tile
