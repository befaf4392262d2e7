"""What the pages of explanation ask: the axes of collapse, phrases, what training changed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from records import episode, turn

from ragen.core.metrics import Metrics, last
from ragen.core.statistics import mcnemar, paired_difference
from ragen.core.types import Group
from ragen.diagnostics.collapse import HIGH_ENTROPY, HIGH_MI, MIN_PROMPTS
from ragen.storage.database import new_run_folder
from ragen.storage.recorder import Recorder
from ragen.viewer.phrases import MOST_PHRASES, MOST_STEPS, spread
from ragen.viewer.reading import NotFound, Question, Runs, Unanswered
from ragen.viewer.server import ROUTES, Json


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder.create(new_run_folder(tmp_path, "made"), "seed = 0\n")


def ask(recorder: Recorder, question: str, **params: Any) -> Any:
    """The answer about a run that is still being written, as it arrives."""
    recorder.commit()
    folder = recorder.folder
    query = {name: str(value) for name, value in params.items()}
    asked = Question(Runs(folder.parent), {"run": folder.name} | query)
    return json.loads(Json(ROUTES[question](asked)).body)


def information(path: str, regime: int, mi: float) -> Metrics:
    measures = {"mi": mi, "conditional_entropy": 2.0, "prompt_entropy": 2.5, "prompts": 12}
    found = {f"information/{path}/{name}": last(value) for name, value in measures.items()}
    return found | {f"information/{path}/regime": last(regime)}


def thinking(*thoughts: str, level: int = 0, success: bool = False) -> Group:
    """A group of one episode, whose turns have these thoughts."""
    made = episode(*(turn(thought=thought) for thought in thoughts), success=success)
    return Group((replace(made, level_seed=level),))


# ---- the two axes


def test_both_paths_and_their_thresholds(recorder: Recorder) -> None:
    recorder.log(1, information("first", 1, 2.0) | information("any", 2, 0.5))
    recorder.log(6, information("first", 4, 0.25))
    found = ask(recorder, "/api/collapse")
    assert list(found["paths"]) == ["first", "any"]
    first = found["paths"]["first"]
    assert (first["steps"], first["mi"]) == ([1, 6], [2.0, 0.25])
    assert first["regime"] == ["diverse", "low-entropy collapse"]
    assert first["prompt_entropy"] == [2.5, 2.5] and first["num_prompts"] == [12, 12]
    assert first["zscore"] == [None, None]  # not measured is null, not 0
    assert found["paths"]["any"]["regime"] == ["template collapse"]
    assert found["thresholds"] == {
        "mi_share": HIGH_MI,
        "conditional_entropy": HIGH_ENTROPY,
        "min_prompts": MIN_PROMPTS,
    }


def test_a_run_that_measured_nothing(recorder: Recorder) -> None:
    recorder.log(1, {"reward/mean": last(1.0)})
    found = ask(recorder, "/api/collapse")
    assert found["paths"] == {} and found["matrix_steps"] == []
    assert found["gradients"] == {"steps": [], "buckets": []}


def test_gradients_by_bucket(recorder: Recorder) -> None:
    recorder.log(1, {"gradient_by_std/0/reward_std": last(0.1)})
    recorder.log(3, {"gradient_by_std/0/reward_std": last(0.2)})
    recorder.log(3, {"gradient_by_std/1/reward_std": last(0.4)})
    recorder.log(3, {"gradient_by_std/1/task_per_token": last(7.0)})
    assert ask(recorder, "/api/collapse")["gradients"] == {
        "steps": [1, 3],
        "buckets": [
            {"bucket": "0", "reward_std": [0.1, 0.2]},
            {"bucket": "1", "reward_std": [None, 0.4], "task_per_token": [None, 7.0]},
        ],
    }


def test_the_matrix_and_what_it_is_of(recorder: Recorder) -> None:
    recorder.log(5, {"reward/mean": last(1.0)})
    scores = [[-1.00004, -math.inf], [-3.5, -2.25], [-2.0, -1.5]]
    recorder.cross_scores(5, "first", scores, [0, 1, 1], ["a", "</script>", "c"], ["x", "y"])
    found = ask(recorder, "/api/matrix", step=5, path="first")
    assert found["scores"] == [[-1.0, None], [-3.5, -2.25], [-2.0, -1.5]]
    assert found["own"] == [0, 1, 1]
    assert found["thoughts"] == ["a", "</script>", "c"] and found["prompts"] == ["x", "y"]
    assert ask(recorder, "/api/collapse")["matrix_steps"] == [{"step": 5, "path": "first"}]
    with pytest.raises(NotFound, match="no cross-scores of step 4"):
        ask(recorder, "/api/matrix", step=4, path="first")


def test_what_was_rolled_back_is_not_shown(recorder: Recorder) -> None:
    for attempt, steps in enumerate(([1, 2, 3], [3])):
        recorder.attempt = attempt
        for step in steps:
            recorder.log(step, information("first", 1, 10.0 * attempt + step))
            recorder.cross_scores(step, "first", [[-float(attempt)]], [0], ["a"], ["x"])
    found = ask(recorder, "/api/collapse")
    assert found["paths"]["first"]["mi"] == [1.0, 2.0, 13.0]
    assert [each["step"] for each in found["matrix_steps"]] == [1, 2, 3]
    assert ask(recorder, "/api/matrix", step=3, path="first")["scores"] == [[-1.0]]


# ---- repeated phrases


def phrases(recorder: Recorder, words: int = 3) -> dict[str, list[float]]:
    found = ask(recorder, "/api/phrases", words=words)
    return {each["phrase"]: each["counts"] for each in found["phrases"]}


def test_a_phrase_is_counted_once_a_thought(recorder: Recorder) -> None:
    recorder.episodes(1, [thinking("up we go up we go", "up we go"), thinking("down")])
    recorder.episodes(2, [thinking("up  we\ngo"), thinking("up we go")])
    # Step 1: two of three thoughts; step 2: both, whatever their white space.
    assert phrases(recorder) == {"up we go": [pytest.approx(2 / 3, abs=1e-4), 1.0]}


def test_a_sentence_that_all_repeat_is_told_once(recorder: Recorder) -> None:
    sentence = "the goal is on the right so I go right"
    recorder.episodes(1, [thinking(sentence), thinking(sentence)])
    # Of its eight phrases of three words those that share two with one before are left out.
    told = list(phrases(recorder))
    assert told[0] == "the goal is" and len(told) < 5
    pairs = [set(pairwise(words)) for words in map(str.split, told)]
    assert all(a.isdisjoint(b) for place, a in enumerate(pairs) for b in pairs[:place])


def test_what_stands_in_one_thought_alone_is_no_phrase(recorder: Recorder) -> None:
    recorder.episodes(1, [thinking("one two three"), thinking("four five six")])
    assert phrases(recorder) == {}


def test_training_and_evaluation_are_counted_apart(recorder: Recorder) -> None:
    recorder.episodes(1, [thinking("a b c"), thinking("a b c")])
    recorder.episodes(1, [thinking("d e f"), thinking("d e f")], phase="eval")
    assert list(phrases(recorder)) == ["a b c"]
    found = ask(recorder, "/api/phrases", words=3, phase="eval")
    assert [each["phrase"] for each in found["phrases"]] == ["d e f"]


def test_long_runs_are_thinned_and_lists_end(recorder: Recorder) -> None:
    same = [thinking(f"a{i} b{i} c{i}") for i in range(MOST_PHRASES + 5)] * 2
    for step in range(1, MOST_STEPS + 10):
        recorder.episodes(step, same if step == 1 else [thinking("x y z")] * 2)
    found = ask(recorder, "/api/phrases", words=3)
    assert len(found["steps"]) == MOST_STEPS
    assert (found["steps"][0], found["steps"][-1]) == (1, MOST_STEPS + 9)
    assert len(found["phrases"]) == MOST_PHRASES
    with pytest.raises(Unanswered, match="a phrase has 2 to"):
        ask(recorder, "/api/phrases", words=100)


def test_a_step_that_comes_is_counted(recorder: Recorder) -> None:
    recorder.episodes(1, [thinking("a b c")] * 2)
    assert phrases(recorder) == {"a b c": [1.0]}
    recorder.episodes(2, [thinking("d")] * 2)
    assert phrases(recorder) == {"a b c": [1.0, 0.0]}


def test_spread() -> None:
    assert spread([1, 2], 3) == [1, 2]
    assert spread(list(range(101)), 3) == [0, 50, 100]


# ---- before and after


def play(recorder: Recorder, step: int, successes: Sequence[bool], phase: str = "eval") -> None:
    groups = [thinking("t", level=123 + i, success=won) for i, won in enumerate(successes)]
    recorder.episodes(step, groups, phase=phase)


def test_before_and_after_are_paired_by_level(recorder: Recorder) -> None:
    before, after = [True, False, False, False] * 4, [True, True, True, False] * 4
    play(recorder, 0, before)
    play(recorder, 5, [False] * 16)  # what lies between does not count
    play(recorder, 10, after)
    (gain,) = ask(recorder, "/api/compare")["comparisons"]
    assert (gain["how"], gain["a"]["step"], gain["b"]["step"]) == ("T=1", 0, 10)
    assert (gain["levels"], gain["won"], gain["lost"]) == (16, 8, 0)
    assert (gain["a"]["value"], gain["b"]["value"]) == (0.25, 0.75)
    expected = paired_difference([[float(x) for x in after]], [[float(x) for x in before]])
    assert gain["difference"]["low"] == expected.low > 0
    assert gain["mcnemar_p"] == mcnemar([1] * 8)


def test_only_levels_of_both_evaluations_are_paired(recorder: Recorder) -> None:
    play(recorder, 0, [False, False, True])
    play(recorder, 10, [True, True])
    (gain,) = ask(recorder, "/api/compare")["comparisons"]
    assert (gain["levels"], gain["won"]) == (2, 2)


def test_one_evaluation_is_no_gain(recorder: Recorder) -> None:
    play(recorder, 0, [True])
    play(recorder, 0, [True], phase="eval greedy")
    recorder.episodes(3, [thinking("t", level=10_000)])
    assert ask(recorder, "/api/compare")["comparisons"] == []
