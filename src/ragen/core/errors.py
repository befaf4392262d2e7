"""The one error a user may see: a sentence that says what is wrong and what to do."""


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
