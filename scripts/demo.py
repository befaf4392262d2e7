"""Train an agent on the frozen lake; does its own set-up. Options are those of `ragen train`."""

from set_up import run

run("", "-m", "ragen.cli.main", "train", "demo", "--json")
