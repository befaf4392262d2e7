"""The options that name an existing agent, for the commands that train or measure with it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ragen.cli.command import Overrides, Parser
from ragen.core.errors import RagenError


def agent_options(parser: Parser) -> None:
    """Add the options of an agent. They stand for keys of the section ``env``."""
    agent = "in place of an environment, an agent of your own: file.py:main, a command, or outside"
    parser.take("--agent", "AGENT", agent)
    task_options(parser)


def task_options(parser: Parser) -> None:
    """Add the options of an agent's tasks."""
    parser.take("--tasks", "FILE", "its tasks, a JSON object in each line", Path)
    parser.take("--verifier", "VERIFIER", "file.py:verify, which rewards its answers")


def with_agent(options: Namespace, overrides: Overrides) -> Overrides:
    """The overrides with the keys that the options of an agent stand for.

    Raises:
        RagenError: An agent has no tasks, or the other options are given without one.
    """
    if options.agent is None:
        if options.tasks or options.verifier:
            raise RagenError("--tasks and --verifier belong to an agent: name it with --agent")
        return overrides
    if "env.name" in overrides or getattr(options, "env", None):
        raise RagenError("--agent and --env are given: name an agent or an environment")
    if options.tasks is None:
        raise RagenError("an agent needs tasks: --tasks FILE, with a JSON object in each line")
    from ragen.settings.code import absolute

    given = {
        "env.name": f"agent:{options.agent}",
        "env.params.tasks": str(options.tasks.resolve()),
    }
    if options.verifier:
        given["env.params.verifier"] = absolute(options.verifier)
    return given | overrides
