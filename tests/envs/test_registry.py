"""The registry, its error messages, and the checker on environments that break one rule each."""

import json
import os
import re
import runpy
import subprocess
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import ragen
from ragen.core.errors import RagenError
from ragen.envs.checker import check
from ragen.envs.contract import Baselines, Env, generators, pick
from ragen.envs.registry import ENVS, make, registered_envs
from ragen.evaluation.baselines import Budget, level_baselines, sample_baselines
from tests.free_text import Echo, Mute

DOCS = Path(__file__).parents[2] / "docs" / "environments.md"


def code_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def documented_env(tmp_path):
    path = tmp_path / "my_env.py"
    (guess,) = [block for block in code_blocks("python") if "class Guess" in block]
    path.write_text(guess, encoding="utf-8")
    return path


VARIANTS = [
    *(("frozen-lake", {"observation": form}) for form in ("coord", "grid_coord", "named")),
    *(("sokoban", {"observation": form}) for form in ("coord", "grid_coord", "named")),
    *((name, {"observation": "picture", "tile": 16}) for name in ("frozen-lake", "sokoban")),
    ("countdown", {"attempts": 3, "min_numbers": 5, "max_numbers": 8}),
    ("haystack", {"frames": 200, "calls": "words"}),
    ("haystack", {"frames": 5000, "observation": "picture"}),
    ("manor", {"rooms": 4, "levers": 0, "delay": 2}),
    ("manor", {"keys": 4}),
    ("manor", {"rooms": 5, "levers": 1, "delay": 5}),
    ("sudoku", {"blanks": 10}),
    ("sudoku", {"size": 9, "blanks": 30}),
    ("word-problems", {"attempts": 3}),
]


@pytest.mark.parametrize(("name", "params"), [*((name, {}) for name in ENVS), *VARIANTS])
def test_every_environment_passes_the_checker(name, params):
    env = make(name, **params)
    assert env.name == name and name in registered_envs()
    check(env, levels=2)


@pytest.mark.parametrize(
    ("name", "params", "turns"),
    [
        ("countdown", {}, 3),
        ("countdown", {"attempts": 3, "largest_number": 5}, 3),
        ("manor", {"rooms": 4, "levers": 0, "delay": 2}, 20),
        ("sudoku", {"blanks": 3}, 1),
        ("sudoku", {"blanks": 3}, 6),
        ("word-problems", {}, 1),
        ("word-problems", {"attempts": 3}, 3),
    ],
)
def test_exact_baselines_agree_with_samples(name, params, turns):
    env, budget, draws = make(name, **params), Budget(turns, 1, turns), 500
    for level in (123, 124) if name == "word-problems" else (123,):
        exact = level_baselines(env, budget, level, 0)
        sampled = sample_baselines(env, budget, level, draws)
        assert exact.draws is None and exact.optimal == sampled.optimal == 1.0
        assert exact.optimal_return == sampled.optimal_return == pytest.approx(1.0)
        error = (max(exact.random * (1 - exact.random), 1 / draws) / draws) ** 0.5
        assert abs(exact.random - sampled.random) <= 4 * error
        # Sudoku pays for each blank: a return from 0 to 1, whose deviation is at most 1/2.
        error = 0.5 / draws**0.5 if name == "sudoku" else error
        consolation = 0.005 if name == "countdown" else 0  # of legal expressions that miss
        assert abs(exact.random_return - sampled.random_return) <= 4 * error + consolation


GOLDEN = {
    "bandit": "115b9fdf2e6fce5b",
    "frozen-lake": "bf753d6bb6583c99",
    "sokoban": "ce587f12719a4cec",
    "sokoban-large": "39fbc8c6c3ba2d4c",
}
"""BLAKE2b of the first observations from level 123 on: levels never change, on any machine."""

PLAY = """
import hashlib
import json
import numpy as np
from ragen.core.seeding import derive
from ragen.envs.registry import make, registered_envs

found = {"derived": derive(0, "train", 1, 2)}
for name in registered_envs():
    env = make(name, **({"products": 200, "split": "all"} if name == "webshop" else {}))
    last = 155 if name in ("bandit", "frozen-lake", "sokoban", "sokoban-large") else 126
    shown = "\\n\\n".join(env.reset(seed=level)[0] for level in range(123, last))
    found[name] = hashlib.blake2b(shown.encode(), digest_size=8).hexdigest()
generator = np.random.Generator(np.random.PCG64(0))
env = make("webshop", products=200, split="all")
env.reset(seed=123)
found["played"] = [env.step(env.random_action(generator))[0] for _ in range(8)]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_no_level_and_no_episode_depends_on_the_process_or_the_salt_of_hash(capsys):
    exec(PLAY, {})
    here = json.loads(capsys.readouterr().out)
    assert {name: here[name] for name in GOLDEN} == GOLDEN
    salt = str(1 + (os.environ.get("PYTHONHASHSEED") == "1"))
    root = str(Path(ragen.__file__).parent.parent)  # for a package that is not installed
    other = subprocess.run(
        [sys.executable, "-c", PLAY],
        env={**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": root},
        capture_output=True,
        check=True,
    )
    assert json.loads(other.stdout) == here


def test_the_environment_of_the_docs_runs_as_written(documented_env):
    runpy.run_path(str(documented_env), run_name="__main__")
    env = make(f"{documented_env}:Guess")
    check(env)
    env.reset(seed=123)
    env.number = 5
    assert env.step("4")[0] == "It is higher than 4."
    assert env.step("5") == ("5 is right.", 1.0, True, False, {"success": True, "effective": True})


def test_an_edited_file_is_read_again(documented_env):
    first = make(f"{documented_env}:Guess")
    assert type(make(f"{documented_env}:Guess")) is type(first)
    text = documented_env.read_text(encoding="utf-8").replace("Guess the number", "Guess again")
    documented_env.write_text(text, encoding="utf-8")
    assert make(f"{documented_env}:Guess").goal == "Guess again"


def test_parameters_override_those_of_the_registered_name():
    assert make("frozen-lake-still", success_probability=0.5)._success_probability == 0.5
    assert make("sokoban-large", boxes=1).reset(seed=1)[0].count("X") == 1


def test_unknown_names_and_parameters_are_refused():
    for name, params, message in (
        ("frozn-lake", {}, "did you mean 'frozen-lake'"),
        ("frozen-lake", {"slipp": 1, "sise": 4}, "no parameter 'slipp'"),
        ("frozen-lake", {"sise": 4}, "did you mean 'size'"),
        ("frozen-lake", {"size": "4"}, "should be a valid integer"),
        ("frozen-lake", {"size": 4.5}, "size = 4.5 does not fit"),
        ("sokoban", {"symbols": "nw"}, "should be 'standard' or 'new'"),
        ("nowhere.py:World", {}, "no file nowhere.py"),
        ("frozen-lake", {"size": 1}, "size"),
        ("frozen-lake", {"p_frozen": 0.0}, "p_frozen"),
        ("frozen-lake", {"success_probability": -0.1}, "success_probability"),
        ("bandit", {"risky_probability": 1.5}, "less than or equal to 1"),
        ("bandit", {"safe_reward": 0.25}, "no arm would be the better one"),
        ("countdown", {"min_numbers": 5}, "min_numbers = 5 is above max_numbers = 4"),
        ("countdown", {"max_numbers": 9}, "less than or equal to 8"),
        (
            "countdown",
            {"largest_target": 2, "largest_number": 10_000, "max_numbers": 2, "min_numbers": 2},
            "no Countdown level with a target up to 2",
        ),
        ("manor", {"rooms": 4, "levers": 3}, "levers = 3: 4 rooms have place for 2"),
        (
            "manor",
            {"rooms": 4, "levers": 0, "delay": 20},
            "no manor of 4 rooms and 0 levers with delay = 20",
        ),
        *(("sokoban", {name: value}, name) for name, value in (("rows", 3), ("boxes", 0))),
        *(("sokoban", {name: value}, name) for name, value in (("boxes", 15), ("search_depth", 2))),
        ("sokoban", {"rows": 4, "cols": 4, "boxes": 2}, "no Sokoban level of"),
        (
            "sokoban",
            {"rows": 5, "cols": 5, "min_solution": 9, "max_solution": 8},
            "or set min_solution = 9 and max_solution = 8 further",
        ),
        ("sudoku", {"blanks": 11}, "blanks = 11: a board of 4 × 4 cells may have 10"),
        ("sudoku", {"size": 6}, "should be 4 or 9"),
        ("webshop", {"products": 200, "split": "train"}, "split 'train' needs 1501 goals"),
        ("webshop", {"products": 10_001}, "at most 10,000 products, not 10,001"),
    ):
        with pytest.raises(RagenError, match=re.escape(message)) as error:
            make(name, **params)
        assert "\n" not in str(error.value)


def test_invalid_environment_files_are_refused(documented_env, tmp_path):
    with pytest.raises(RagenError, match="did you mean 'Guess'"):
        make(f"{documented_env}:Gues")
    with pytest.raises(RagenError, match="no parameter 'depth'; it has none"):
        make(f"{documented_env}:Guess", depth=3)
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n", encoding="utf-8")
    with pytest.raises(RagenError, match=r"broken\.py cannot be loaded"):
        make(f"{broken}:World")
    half = tmp_path / "half.py"
    half.write_text(
        "from ragen.envs.contract import Env\nclass Half(Env):\n    goal = 'x'\n", encoding="utf-8"
    )
    with pytest.raises(RagenError, match=r"lacks .*get_state"):
        make(f"{half}:Half")


class Coin(Env):
    """Follows all rules; each environment below breaks one."""

    name, goal, rules, actions = "coin", "Coin", "Flip until heads.", ("Flip", "Wait")
    shared = 0

    def reset(self, *, seed=None, options=None):
        level, self.noise = generators(seed, options)
        self.limit = 1 + int(level.random() * 3)
        self.heads, self.flips = False, 0
        return self.show(), {}

    def show(self):
        return f"{'heads' if self.heads else 'tails'}, limit {self.limit}"

    def step(self, action):
        before = self.state_key()
        if self.action_index(action) == 0:
            self.flips += 1
            self.heads = self.noise.random() < 0.5
        info = {"success": self.heads, "effective": self.state_key() != before}
        return self.show(), float(self.heads), self.heads, False, info

    def get_state(self):
        noise = self.noise.bit_generator.state
        return {"limit": self.limit, "heads": self.heads, "flips": self.flips, "noise": noise}

    def set_state(self, state):
        self.limit, self.heads, self.flips = state["limit"], state["heads"], state["flips"]
        self.noise.bit_generator.state = state["noise"]

    def state_key(self):
        return self.show()


class Ambient(Coin):
    breaks = "the same seeds must give the same episode"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=None, options=options)
        self.limit = int(generators(None, None)[0].random() * 1e9)  # Never equal by chance.
        return self.show(), {}


class NoisyLevel(Coin):
    breaks = "must follow from the seed alone"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.limit = int(self.noise.random() * 1e9)
        return self.show(), {}


class Forgetful(Coin):
    breaks = "set_state must restore everything"

    def get_state(self):
        return {key: value for key, value in super().get_state().items() if key != "noise"}

    def set_state(self, state):
        super().set_state(state | {"noise": self.noise.bit_generator.state})


class Shared(Coin):
    breaks = "must not share anything"

    def reset(self, *, seed=None, options=None):
        Shared.shared = 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        Shared.shared += 1
        observation, _, *rest = super().step(action)
        return (observation, float(Shared.shared), *rest)


class Meddling(Coin):
    breaks = "solve and baselines must not change the environment"

    def solve(self, turns_left, actions_left, actions_per_turn):
        self.step("Flip")
        return ["Flip"]


def step_with(**changes):
    """A step with other results."""
    names = ("observation", "reward", "terminated", "truncated", "info")

    def step(env, action):
        return tuple((dict(zip(names, Coin.step(env, action), strict=True)) | changes).values())

    return step


SAID = count(1)
CHANGES = {
    "get_state must return JSON values only": {"get_state": lambda env: {"limit": np.int64(1)}},
    "'effective'] must be true where state_key changed": {
        "step": step_with(terminated=False, info={"success": False, "effective": False})
    },
    "bool info['success']": {"step": step_with(info={})},
    "random ≤ optimal": {"baselines": lambda *_: Baselines(0.5, 0.25, 0.0, 0.0)},
    "a finite number": {"step": step_with(reward=float("nan"))},
    "must raise ValueError for an unknown action": {"action_index": lambda *_: 1},
    "differ by more than case": {"actions": ("Flip", "flip ")},
    "NoneType as rules: text is expected": {"rules": None},
    "drawing must not change the environment": {"drawing": lambda env: [env.step("Flip")[0]]},
    "solve must return 1 to 2 legal actions": {"solve": lambda *_: ["Flip"] * 3},
    "random_action must follow from its generator": {
        **{"actions": None, "action_index": len},
        "random_action": lambda *_: "x" * next(SAID),
    },
}
BROKEN = [
    *Coin.__subclasses__(),
    *(type("Broken", (Coin,), {**each, "breaks": rule}) for rule, each in CHANGES.items()),
]


def test_a_correct_environment_passes_the_checker():
    for env in (Coin(), Echo(), Mute()):
        check(env)


@pytest.mark.parametrize("cls", BROKEN, ids=lambda c: c.breaks)
def test_a_broken_rule_is_named_and_the_environment_closed(cls, monkeypatch):
    closed = []
    monkeypatch.setattr(cls, "close", lambda env: closed.append(env))
    with pytest.raises(RagenError, match=re.escape(cls.breaks)):
        check(cls())
    assert len(closed) == 1


def test_level_and_noise_generators_are_independent():
    level, noise = generators(5, {"noise_seed": 5})
    assert level.random() != noise.random()
    # Without a noise seed, the seed of the level determines the noise.
    assert generators(5, None)[1].random() == generators(5, {})[1].random()
    assert generators(None, None)[0].random() != generators(None, None)[0].random()


def test_pick_is_uniform():
    generator = np.random.Generator(np.random.PCG64(0))
    counts = np.bincount([pick(generator, (0, 1, 2)) for _ in range(3000)])
    assert (abs(counts - 1000) < 4 * (3000 * 2 / 9) ** 0.5).all()
