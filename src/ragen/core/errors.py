"""The one error that a user may see, what its message suggests, and text from outside in it."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any
from unicodedata import category

HARMLESS = "\n\t\u200c\u200d"
"""Line ends, tabs, and the two joiners that some scripts and emoji need."""


class RagenError(ValueError):
    """A user's mistake or a machine's limit, in one line with the remedy; commands exit with 2."""

    exit_code = 2

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the constructor: a subclass takes other arguments than its text."""
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(kind: type[RagenError], args: tuple[Any, ...]) -> RagenError:
    return kind.__new__(kind, *args)


class UnplayableError(RagenError):
    """Every episode of a step or an evaluation failed; the cause is not the policy."""


class NotFiniteError(RagenError):
    """A model (the critic if `of_critic`) computed NaN or infinity: its weights do not work."""

    def __init__(self, numbers: str, of_critic: bool = False) -> None:
        super().__init__(
            f"{numbers} are not finite: the weights hold NaN, or are so large that sums overflow; "
            "take other weights, such as those of an earlier checkpoint"
        )
        self.numbers, self.of_critic = numbers, of_critic


class MismatchError(RagenError):
    """With the same weights, sampler and learner give a sampled token different logprobs."""

    def __init__(self, token: int, sampled: float, recomputed: float, bound: float) -> None:
        super().__init__(
            f"token {token} was sampled with a logprob of {sampled:.5g}, and the learner computes "
            f"{recomputed:.5g} with the same weights, where {bound:.2g} nats may be rounding"
        )
        self.token, self.difference, self.bound = token, abs(recomputed - sampled), bound


class EngineLost(RagenError):
    """A process of the engine is lost: a new engine has to be made.

    `details` is all that is known of the loss, and `process` the name of the process, if known.
    """

    def __init__(self, text: str, details: str = "", process: str = "") -> None:
        super().__init__(text)
        self.details, self.process = details, process


class GuardStop(RagenError):
    """The guard stopped a run, saved as it was; commands exit with 3."""

    exit_code = 3


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of an error message: a suggestion, or `otherwise` if no known name is near.

    A name may be near as a whole, or only in its last part (``lr`` of ``update.lr``).

    Example:
        >>> nearest("banditt", ["bandit", "sokoban"]), nearest("lr", ["seed", "update.lr"])
        ("; did you mean 'bandit'?", "; did you mean 'update.lr'?")
        >>> nearest("xyz", ["bandit"], "it may be bandit")
        '; it may be bandit'
    """
    names = list(known)
    by_last_part = {_last_part(full): full for full in reversed(names)}
    parts = get_close_matches(_last_part(name), list(by_last_part), 1, 0.75)
    found = get_close_matches(name, names, 1, 0.75) or [by_last_part[part] for part in parts]
    found = found or get_close_matches(name, names, 1, 0.5)
    if found:
        return f"; did you mean {found[0]!r}?"
    return otherwise and f"; {otherwise}"


def printable(text: str) -> str:
    r"""The text with every character escaped that a terminal obeys, hides or cannot encode.

    These are control characters, formats such as the reversal of the writing direction, separators
    of lines other than ``\n``, and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(map(_escaped, text))


def last_line(text: str | None) -> str:
    """The last line of an error's text, which says what went wrong; empty without a text."""
    return (text or "").strip().rpartition("\n")[2]


def _escaped(character: str) -> str:
    if character in HARMLESS or category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    return character.encode("unicode_escape").decode()


def _last_part(name: str) -> str:
    return name.replace("/", ".").rpartition(".")[2]
