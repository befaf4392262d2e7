"""The one error that a user may see, and the suggestion of a known name in its message."""

from collections.abc import Iterable
from difflib import get_close_matches


class RagenError(ValueError):
    """A user's mistake or a machine's limit, in one line with the remedy; commands exit with 2.

    Example:
        >>> str(RagenError("unknown environment 'banditt'; did you mean 'bandit'?"))
        "unknown environment 'banditt'; did you mean 'bandit'?"
    """

    exit_code = 2


class GuardStop(RagenError):
    """The guard stopped a run, saved as it was; commands exit with 3."""

    exit_code = 3


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of an error message: a suggestion, or `otherwise` if no known name is near.

    A name is near as a whole, or in its last part (``lr`` of ``update.lr``, ``ppo`` of
    ``starpo/ppo``).

    Example:
        >>> nearest("banditt", ["bandit", "sokoban"]), nearest("lr", ["seed", "update.lr"])
        ("; did you mean 'bandit'?", "; did you mean 'update.lr'?")
        >>> nearest("xyz", ["bandit"], "it may be bandit")
        '; it may be bandit'
    """
    names = list(known)
    by_last_part = {_last_part(full): full for full in reversed(names)}
    parts = get_close_matches(_last_part(name), list(by_last_part), 1, 0.75)
    for matches in (
        get_close_matches(name, names, 1, 0.75),
        [by_last_part[part] for part in parts],
        get_close_matches(name, names, 1, 0.5),
    ):
        if matches:
            return f"; did you mean {matches[0]!r}?"
    return otherwise and f"; {otherwise}"


def _last_part(name: str) -> str:
    return name.replace("/", ".").rpartition(".")[2]
