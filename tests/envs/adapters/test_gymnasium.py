"""Gymnasium's environments through RAGEN: what they show and pay is what the bare library does."""

from __future__ import annotations

import enum
import re
from pathlib import Path

import gymnasium
import pytest
from gymnasium import spaces

from ragen.core.errors import RagenError
from ragen.envs.checker import check
from ragen.envs.registry import make
from ragen.evaluation.baselines import Budget, sample_baselines
from tests.adapted import noise_of, random_episodes

TOY_TEXT = (*("FrozenLake-v1", "Taxi-v4", "CliffWalkingSlippery-v1", "Blackjack-v1"),)
MINIGRID = ("MiniGrid-Empty-5x5-v0", "MiniGrid-DoorKey-5x5-v0", "MiniGrid-Dynamic-Obstacles-5x5-v0")


class Words(gymnasium.Env):
    """Text in a dict, and an enumeration of actions that counts up to three."""

    observation_space = spaces.Dict({"seen": spaces.Text(20), "number": spaces.MultiDiscrete([4])})
    action_space = spaces.Discrete(2)
    actions = enum.IntEnum("Actions", {"more": 0, "stop": 1})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = 0
        return {"seen": "start", "number": [0]}, {}

    def step(self, action):
        self.number += action == 0
        ended = bool(action == 1 or self.number == 3)
        return {"seen": "on", "number": [self.number]}, -1.0, ended, False, {}


@pytest.fixture(autouse=True)
def registered():
    if "Words-v0" not in gymnasium.registry:
        gymnasium.register("Words-v0", Words)


def bare(target, episode, **params):
    """The library's own environment at the start of a recorded episode, and what it shows."""
    env = gymnasium.make(target, **params)
    observation, _ = env.reset(seed=episode.level_seed)
    env.unwrapped.np_random = noise_of(episode.noise_seed)
    return env, observation


def read(target, env, text):
    """The observation that a text stands for, or what can be compared of it."""
    if target.startswith("Taxi"):
        row, column = map(int, re.findall(r"\d", text))
        places = ("Red", "Green", "Yellow", "Blue", "in the taxi")
        where, to = re.search(r"passenger (?:at )?(.+); destination (\w+)", text).groups()
        return env.unwrapped.encode(row, column, places.index(where), places.index(to))
    if target.startswith("Blackjack"):
        total, dealer = re.search(r"sum (\d+).*shows (an ace|\d+)", text).groups()
        return int(total), 1 if dealer == "an ace" else int(dealer), int("usable" in text)
    return text.replace("\n", "").index("P")


@pytest.mark.parametrize("target", TOY_TEXT)
def test_toy_text_pays_and_shows_what_the_library_does(target):
    actions = make(f"gymnasium:{target}").actions
    for episode in random_episodes(f"gymnasium:{target}"):
        env, observation = bare(target, episode)
        ended = False
        for turn in episode.turns:
            assert read(target, env, turn.observation) == observation
            reward = 0.0
            for action in turn.actions_executed:
                observation, earned, ended, _, _ = env.step(actions.index(action))
                reward += earned
            assert turn.reward == reward
        assert episode.terminated == ended
        won = ended and (target.startswith("Cliff") or earned > 0)
        assert episode.success == won
        assert read(target, env, episode.final_observation) == observation


@pytest.mark.parametrize("target", MINIGRID)
def test_minigrid_pays_and_shows_what_the_library_does(target):
    pytest.importorskip("minigrid", reason="needs the extra minigrid")
    actions = make(f"gymnasium:{target}").actions
    for episode in random_episodes(f"gymnasium:{target}", view="whole"):
        env, observation = bare(target, episode)
        for turn in episode.turns:
            mission, facing, *rows = turn.observation.split("\n")
            assert mission == f"mission: {observation['mission']}"
            where = ("east", "south", "west", "north")[observation["direction"]]
            assert facing.startswith(f"you face {where} and carry ")
            drawn = [re.findall("..", row) for row in env.unwrapped.pprint_grid().split("\n")]
            assert [[two(cell) for cell in row.split()] for row in rows] == drawn
            reward = 0.0
            for action in turn.actions_executed:
                observation, earned, *_ = env.step(actions.index(action))
                reward += earned
            assert turn.reward == reward


def two(cell):
    """A cell as MiniGrid prints it, in two characters."""
    signs = {".": "  ", "#": "WG", "G": "GG", ">": ">>", "v": "VV", "<": "<<", "^": "^^"}
    if cell in signs:
        return signs[cell]
    *state, color, kind = cell.split("-")
    if kind == "door":
        return {"open": "__", "locked": f"L{color[0].upper()}"}.get(
            state[0], f"D{color[0].upper()}"
        )
    return {"ball": "A", "key": "K"}[kind] + color[0].upper()


def test_the_agents_view_has_the_agent_at_the_bottom_and_hides_the_rest():
    pytest.importorskip("minigrid", reason="needs the extra minigrid")
    env = make("gymnasium:MiniGrid-DoorKey-6x6-v0")
    rows = env.reset(seed=123)[0].split("\n")[2:]
    assert [row.split().index("^") for row in rows if "^" in row] == [3] and "^" in rows[-1]
    assert "?" in rows[0] and "yellow-key" in rows[-1]


@pytest.mark.parametrize("target", [*TOY_TEXT, "Words-v0", MINIGRID[1]])
def test_environment_keeps_the_contract(target):
    if target in MINIGRID:
        pytest.importorskip("minigrid", reason="needs the extra minigrid")
    check(make(f"gymnasium:{target}"), levels=2)


PICTURES = [(MINIGRID[1], "agent", 56), (MINIGRID[1], "whole", 40)]


@pytest.mark.parametrize(("target", "view", "side"), PICTURES)
def test_minigrid_shows_the_picture_that_the_library_renders(target, view, side):
    pytest.importorskip("minigrid", reason="needs the extra minigrid")
    name, params = f"gymnasium:{target}", {"tile_size": 8}
    env = make(name, view=view, observation="picture", **params)
    text, _ = env.reset(seed=5)
    assert text.endswith("and carry nothing\n<image>") and " symbol" not in env.rules
    assert "The picture shows" in env.rules and "# is a wall" not in env.rules
    own = gymnasium.make(target, render_mode="rgb_array", agent_pov=view == "agent", **params)
    own.reset(seed=5)
    for action in ("left", "forward", "right"):
        ((pixels,), key) = env.pictures(), env.state_key()
        assert pixels.shape == (side, side, 3) and (pixels == own.render()).all()
        env.step(action)
        own.step(env.actions.index(action))
        assert (env.state_key() != key) == (own.render() != pixels).any()
    check(env, levels=1)


def test_any_environment_that_renders_can_be_seen():
    """Its values are no text, and its docstring gives the rules."""
    pytest.importorskip("pygame", reason="needs the extra minigrid")
    env = make("gymnasium:CartPole-v1", observation="picture")
    assert env.reset(seed=1)[0] == "<image>" and env.pictures()[0].shape == (400, 600, 3)
    before = env.state_key()
    assert env.step("1")[4]["effective"] and env.state_key() != before
    env.close()


def test_an_environment_without_pictures_is_refused():
    with pytest.raises(RagenError, match="take its pictures"):
        make("gymnasium:CartPole-v1")
    gymnasium.register("Blind-v0", lambda render_mode=None: Words())
    with pytest.raises(
        RagenError, match=r"Blind-v0 shows no pictures: .* rgb_array, and it has No"
    ):
        make("gymnasium:Blind-v0", observation="picture")
    gymnasium.registry.pop("Blind-v0")
    with pytest.raises(RagenError, match=r"FrozenLake-v1 shows no pictures: .* and it has ansi"):
        make("gymnasium:FrozenLake-v1", observation="picture", render_mode="ansi")


def test_floor_is_the_chance_over_all_courses():
    chance = exact_lake(gymnasium.make("FrozenLake-v1").unwrapped.P, 20)
    found = sample_baselines(make("gymnasium:FrozenLake-v1"), Budget(10, 2, 20), 123, 60).random
    assert abs(found - chance) < 3 * (chance * (1 - chance) / 60) ** 0.5


def exact_lake(transitions, actions):
    """The chance that uniformly random play reaches the goal, by summing over all its courses."""
    places, solved = {0: 1.0}, 0.0
    for _ in range(actions):
        following = {}
        for place, weight in places.items():
            for action in range(4):
                for chance, there, reward, ended in transitions[place][action]:
                    share = weight * chance / 4
                    solved += share * reward
                    if not ended:
                        following[there] = following.get(there, 0.0) + share
        places = following
    return solved


def test_parameters_reach_the_library_and_its_rules():
    env = make("gymnasium:FrozenLake-v1", is_slippery=False, map_name="8x8")
    slippery = make("gymnasium:FrozenLake-v1", success_rate=0.2)
    assert "as intended with probability 0.2," in slippery.rules
    assert "slippery" not in env.rules and env.reset(seed=1)[0].count("\n") == 7
    assert env.step("Right")[0].startswith("SPFF")
    with pytest.raises(RagenError, match="no_such"):
        make("gymnasium:FrozenLake-v1", no_such=1)


def test_a_module_before_the_name_registers_the_environment(tmp_path, monkeypatch):
    """As in `gymnasium.make`; its code is a part of what identifies the environment."""
    monkeypatch.chdir(tmp_path)
    text = "import gymnasium\nfrom tests.envs.adapters.test_gymnasium import Words\n"
    text += "gymnasium.register('Mine-v0', Words)\n"
    Path("own_registration.py").write_text(text)
    env = make("gymnasium:own_registration:Mine-v0")
    check(env, levels=1)
    assert env.versions[-1].startswith("blake2b:")
    for name, said in (
        ("no_such:Mine-v0", "no_such cannot be loaded: ModuleNotFoundError"),
        ("own_registration:Yours-v0", "gymnasium:Yours-v0: Environment 'Yours' doesn't exist"),
        ("a:own_registration:Mine-v0", "a:own_registration cannot be loaded"),
    ):
        with pytest.raises(RagenError, match=said):
            make(f"gymnasium:{name}")


def test_spaces_and_docstring_describe_an_environment_that_ragen_does_not_know():
    env = make("gymnasium:Words-v0")
    assert env.actions == ("more", "stop") and env.goal == "Words-v0"
    assert env.rules == Words.__doc__
    assert set(env.reset(seed=1)[0].split("\n")) == {"seen: start", "number: [0]"}
    assert env.step("stop")[2:] == (True, False, {"success": False, "effective": True})
    ended = make("gymnasium:Words-v0", success="end")
    ended.reset(seed=1)
    assert ended.step("stop")[4]["success"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("FrozenLake-v9", "FrozenLake"),
        ("Taxi-v3", "Please use 'Taxi-v4'"),
        ("Nope-v1", "doesn't exist"),
        ("Pendulum-v1", "RAGEN plays discrete ones"),
        ("CartPole-v1", "observations in a Box"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(target, message):
    with pytest.raises(RagenError, match=re.escape(message)) as error:
        make(f"gymnasium:{target}")
    assert "\n" not in str(error.value) and target.partition("-")[0] in str(error.value)
