"""`ragen base --env`: a small model for any environment, from what random play shows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen import train
from ragen.bases import env_base, screen
from ragen.bases.base import LessonPlayer
from ragen.bases.copying import Copier
from ragen.bases.curriculum import Lesson, Stage
from ragen.bases.env_base import card, stages_of
from ragen.bases.screen import (
    HABITS,
    ITEMS,
    Reader,
    frequent,
    items_of,
    pieces,
    random_actions,
    survey,
    texts_of,
    with_screen,
)
from ragen.bases.tokenizer import build, words_for
from ragen.chat.chat import Chat
from ragen.chat.prompt import Limits
from ragen.cli.main import main
from ragen.core.types import Sample
from ragen.envs.registry import env_factory
from ragen.models.names import is_embedded, taught_style
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import Setup
from ragen.settings.resolve import resolve
from tests.free_text import Echo
from tests.scripted_policy import ScriptedPolicy

FILES = Path(__file__).parents[1]
ECHO = f"{FILES / 'free_text.py'}:Echo"
CORRIDOR = f"{FILES.parent / 'src/ragen/envs/example.py'}:Corridor"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _few_demonstrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A survey of 32 levels, and the fewest demonstrations a step."""
    monkeypatch.setattr(screen, "EPISODES", 32)
    monkeypatch.setattr(env_base, "STEP_TOKENS", 1)


def test_text_is_read_in_words_numbers_and_symbols() -> None:
    assert pieces("Go to A7, then_stop: größer") == [
        *("Go", "to", "A", "7", ",", "then", "_", "stop", ":", "größer"),
    ]
    assert pieces("#P_\nOX#") == [*"#P_OX#"]
    assert items_of("a b\n\nc")[-1] == ("c", 3, 1)


def test_a_thought_states_what_tells_a_screen_from_others() -> None:
    screens = ["H P _ _ G", "H _ P _ G", "G _ _ P H", "G P _ _ H"]
    reader = Reader(screens, random_actions)
    assert [tuple(item) for item in reader.telling("G _ P _ H")] == [
        *(("G", 1, 1), ("_", 1, 2), ("P", 1, 3), ("H", 1, 5)),
    ], "three of four screens show a _ in place 4"
    same = Reader(["Nothing to see"], random_actions)
    assert [item.piece for item in same.telling("Nothing to see")] == ["Nothing"], "at least one"
    many = Reader([" ".join("abcdefgh"[i:] + "abcdefgh"[:i]) for i in range(8)], random_actions)
    assert len(many.telling("h g f e d c b a")) == ITEMS


def test_a_habit_follows_the_screen_and_its_opposite_is_as_likely() -> None:
    screens = ["H P _ G", "H _ P G", "G _ P H", "G P _ H"]
    reader = Reader(screens, random_actions, ("Left", "Right"))
    mirrored = {habit._replace(before=habit.after, after=habit.before) for habit in reader.habits}
    assert mirrored == set(reader.habits) and 6 <= len(reader.habits) <= HABITS
    env = with_screen(env_factory(CORRIDOR, slip=0.0)())
    shown, _ = env.reset(seed=2)
    generator = np.random.Generator(np.random.PCG64(0))
    seen = set()
    for _ in range(200):
        (piece,) = reader.read(env, Limits(1, 3, 9, 3), generator)
        thought, _, rest = piece.text.partition("</think><answer>")
        actions = rest.removesuffix("</answer>").split(" || ")
        number, colon, _ = thought.partition(" :")
        if colon:
            habit = reader.habits[int(number)]
            before = shown.index(habit.first) < shown.index(habit.second)
            assert set(actions) == {habit.before if before else habit.after}
            seen.add(habit)
    assert seen == {habit for habit in reader.habits if habit.second in shown}
    assert Reader(screens, random_actions).habits == [], "free text has none"


def look_ups(turns: int, window: int, max_length: int) -> tuple[Chat, list[Sample]]:
    """Three look-ups with one action a turn."""
    make = env_factory(CORRIDOR, slip=0.0)
    screens = ["H P _ _ _ _ G", "G P _ _ _ _ H"]
    reader = Reader(screens, random_actions)
    chat = Chat(build(words_for(pieces(" ".join(screens)), 20)))
    budgets: Any = {"actions": turns, "actions_per_turn": 1, "window": window}
    setup = Setup("corridor", lambda: with_screen(make()), **budgets)
    lesson = Lesson(reader.look_up, setup, turns=(turns,), held_out=False)
    player = LessonPlayer(chat, 0, max_length)
    return chat, player.samples(Stage("look-up", 1, (lesson,), episodes=3), 0, 0)


def test_a_look_up_trains_places_and_contents_only() -> None:
    chat, samples = look_ups(1, 0, 9999)
    for sample in samples:
        tokens = list(zip(sample.token_ids, sample.loss_mask, strict=True))
        learned = chat.decode([token for token, on in tokens if on]).partition("</think>")
        shown = chat.decode([token for token, _ in tokens])
        screen = shown.split("turns")[0].splitlines()[1].split()
        asked = shown.partition("<think>")[2].partition("</think>")[0].split(" ,")[:-1]
        answers = []
        for query in asked:
            first, word, last = query.split()
            assert screen[int(first if word == "=" else last) - 1] == (
                last if word == "=" else first
            )
            answers.append(last)
        assert learned[0].split() == answers and learned[2].startswith("<answer>")


def test_lessons_write_the_summaries_that_prompts_ask_for() -> None:
    chat = Chat(build(words_for(pieces("H P _ G Left Right"), 20)))
    reader = Reader(["H P _ _ _ _ G"], random_actions)
    budgets: Any = {"turns": 9, "actions": 9, "actions_per_turn": 1, "summary": "learned"}
    setup = Setup("corridor", env_factory(CORRIDOR), max_tokens=20, **budgets)
    *_, reading = stages_of(reader, setup, 4)
    told = 0
    for sample in LessonPlayer(chat, 0, 130).samples(reading, 0, 0):
        learned = [t for t, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
        asked = chat.decode(sample.token_ids).count("summary ?")
        assert chat.decode(learned).count(" -</think>") == asked
        told += asked
    assert told


def learned_by_turn(window: int, max_length: int) -> dict[tuple[int, int], list[int]]:
    """The tokens that are learned of each turn of look-ups of four turns."""
    found: dict[tuple[int, int], list[int]] = {}
    for sample in look_ups(4, window, max_length)[1]:
        places = zip(sample.token_ids, sample.loss_mask, sample.turn_index, strict=True)
        for token, on, turn in places:
            if on:
                found.setdefault((sample.episode, turn), []).append(token)
    return found


@pytest.mark.parametrize(("window", "max_length"), [(1, 9999), (2, 9999), (0, 200)])
def test_what_is_learned_does_not_depend_on_the_turns_in_a_prompt(
    window: int, max_length: int
) -> None:
    """Also where a long episode drops its oldest turns."""
    whole = learned_by_turn(0, 9999)
    assert len(whole) > 6 and learned_by_turn(window, max_length) == whole


def test_the_vocabulary_holds_what_was_met_and_spells_the_rest() -> None:
    setup = Setup("echo", Echo, turns=2, actions_per_turn=1, actions=2)
    met = survey(setup, random_actions, 0)
    tokenizer = build(words_for(frequent(texts_of(met), 1000), 20))
    text = "The word is river .\nturns 2 actions 2 max 1"
    spaced = [" word", " is", " river", " .", "\n", "turns", " 2"]
    assert tokenizer.tokenize(text)[1:8] == spaced, "a token each"
    unknown = "The word is Zürich ."
    assert tokenizer.decode(tokenizer.encode(unknown)) == unknown
    assert Chat(tokenizer).exact


def test_a_base_says_what_it_was_shown_and_trains_without_a_recipe(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = "--steps 1 --env.timeout_s 9.0 --env.max_actions 2"
    assert main(["base", "--env", ECHO, "--out", "one", *keys.split()]) == 0
    printed = capsys.readouterr().out
    assert f"ragen train --env {ECHO} --model one" in printed
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert 300_000 < model.num_parameters() < 700_000
    card = (tmp_path / "one" / "README.md").read_text("utf-8")
    for words in (
        *("episodes of random play", "at most 2 turns", "no plan and no skill", "The word is"),
        *("Heads that copy were written", "DIR --env.timeout_s 9.0 --env.max_actions 2` trains"),
    ):
        assert words in card
    assert is_embedded("one") and taught_style("one") == "compact"
    tokens = AutoTokenizer.from_pretrained(tmp_path / "one").tokenize("turns 2 actions")
    assert tokens == ["turns", " 2", " actions"]
    sizes = {"rollout.num_groups": 1, "rollout.group_size": 2, "rollout.max_tokens": 8}
    start = {"model": "one", "steps": 1, "eval.episodes": 0, "threads": 1}
    result = train(None, start | sizes, env=ECHO)
    assert result.run.name == "Echo-1" and taught_style(str(result.run)) == "compact"
    again = resolve(None, {"env": ECHO, "model": str(result.run)})
    assert again.prompt.style == "compact", "a run's model reads what it read"


def test_the_card_says_how_to_train_in_the_same_environment() -> None:
    for name, params, command in (
        ("/home/me/w.py:W", {"rows": 4, "wide": True}, "w.py:W --model DIR --env.params.rows 4"),
        ("openenv:http://host:8000", {"field": "a b"}, "openenv:http://host:8000 --model DIR"),
        ("openenv:/home/me/a.py:app", {}, "openenv:a.py:app --model DIR"),
        ("word-problems", {"path": "/home/me/w.jsonl"}, "word-problems --model DIR"),
    ):
        given = {"env.name": name} | {f"env.params.{key}": each for key, each in params.items()}
        setup, copier = Setup(name, Echo), Copier([], random_actions)
        text = card(given, setup, copier, "A screen", "1 million parameters", 1, 0)
        assert f"`ragen train --env {command}" in text and "/home" not in text
        assert all(f"--env.params.{key} " in text for key in params)
    assert " --env.params.path w.jsonl`" in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("base --out there", "name a family (ragen base --help), or --env, or --agent"),
        (f"base --env {ECHO} --out there --update.lr 0.1", "update.lr has no effect on this base"),
        (f"base --env {ECHO} --out there --env.isolate true", "env.isolate has no effect"),
        ("base bandit --out there --env.max_turns 3", "env.max_turns has no effect"),
        (f"base --env {ECHO.replace('Echo', 'Mute')} --out there", "give it a random_action"),
        (f"base --env {ECHO} --out .", ". exists already; name a folder that does not"),
    ],
)
def test_a_mistake_gives_one_line(line: str, words: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not Path("there").exists()


ODD = """
from tests.free_text import Echo

class Long(Echo):
    def state_key(self):
        return "word " * 2100

class Odd(Echo):
    tools = property(lambda _: 1 / 0)

class Counted(Echo):
    opened = closed = 0

    def __init__(self):
        Counted.opened += 1

    def close(self):
        Counted.closed += 1

    def state_key(self):
        return super().state_key() + "!" * 90_000
"""


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ("odd.py:Long", "leaves room for a reply within the 2048 tokens"),
        ("odd.py:Odd", "cannot be made: ZeroDivisionError"),
        (
            f"{FILES / 'rogue.py'}:Rogue --env.params.misdeed reset --env.params.every 5",
            "LookupError: no such level; run `ragen check`",
        ),
    ],
)
def test_an_environment_that_shows_too_much_or_fails_is_one_line(
    env: str, complaint: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd.py").write_text(ODD)
    words = ["raise in reset" if word == "reset" else word for word in env.split()]
    assert main(["base", "--env", *words, "--out", "there"]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1 and not Path("there").exists()


def test_lessons_close_each_environment_and_keep_its_limits(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    make = env_factory(f"{tmp_path}/odd.py:Counted")
    setup = Setup("odd", make, turns=1, actions=1, timeout_s=7.5)
    (stage,) = stages_of(Copier(["word"], random_actions), setup, 4)
    assert {lesson.setup.timeout_s for lesson in stage.lessons} == {7.5}
    player = LessonPlayer(Chat(build(words_for(["!" * 90_000], 20))), 0, 9999)
    counted: Any = type(make())
    counted.opened = counted.closed = 0
    assert len(player.samples(stage, 0, 0)) == 4
    assert counted.opened == counted.closed == 4


def test_a_screen_plays_as_the_environment_in_it() -> None:
    make = env_factory(CORRIDOR)
    replies = ["</think><answer>Left || Right || Left</answer>"] * 4
    played: list[Any] = []
    for each in (make, lambda: with_screen(make())):
        setup = Setup("corridor", each, turns=4, actions_per_turn=3, actions=12)
        (group,) = asyncio.run(run_groups(ScriptedPolicy(replies), setup, [7], 1, (0, "test")))
        played.append([(turn.observation, turn.reward) for turn in group.episodes[0].turns])
    assert played[0] == played[1]
