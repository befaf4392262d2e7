"""The API of the collapse page, repeated phrases, and evaluations before and after training."""

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
from ragen.viewer.phrases import MOST_PHRASES, MOST_STEPS
from ragen.viewer.reading import NotFound, Question, Runs, Unanswered
from ragen.viewer.server import ROUTES, Json


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder.create(new_run_folder(tmp_path, "made"), "seed = 0\n")


def ask(recorder: Recorder, question: str, **params: Any) -> Any:
    """The answer about an open run, decoded from JSON."""
    recorder.commit()
    folder = recorder.folder
    query = {name: str(value) for name, value in params.items()}
    request = Question(Runs(folder.parent), {"run": folder.name} | query)
    return json.loads(Json(ROUTES[question](request)).body)


def information(path: str, regime: int, mi: float) -> Metrics:
    measures = {"mi": mi, "conditional_entropy": 2.0, "prompt_entropy": 2.5, "prompts": 12}
    metrics = {f"information/{path}/{name}": last(value) for name, value in measures.items()}
    return metrics | {f"information/{path}/regime": last(regime)}


def group_of_thoughts(*thoughts: str, level: int = 0, success: bool = False) -> Group:
    """A group of one episode, whose turns have these thoughts."""
    played = episode(*(turn(thought=thought) for thought in thoughts), success=success)
    return Group((replace(played, level_seed=level),))


# ---- collapse


def test_collapse_has_both_paths_and_their_thresholds(recorder: Recorder) -> None:
    recorder.log(1, information("first", 1, 2.0) | information("any", 2, 0.5))
    recorder.log(6, information("first", 4, 0.25))
    answer = ask(recorder, "/api/collapse")
    assert list(answer["paths"]) == ["first", "any"]
    first = answer["paths"]["first"]
    assert (first["steps"], first["mi"]) == ([1, 6], [2.0, 0.25])
    assert first["regime"] == ["diverse", "low-entropy collapse"]
    assert first["prompt_entropy"] == [2.5, 2.5] and first["num_prompts"] == [12, 12]
    assert first["zscore"] == [None, None]  # Null where it was not measured, not 0.
    assert answer["paths"]["any"]["regime"] == ["template collapse"]
    assert answer["thresholds"] == {
        "mi_share": HIGH_MI,
        "conditional_entropy": HIGH_ENTROPY,
        "min_prompts": MIN_PROMPTS,
    }


def test_collapse_is_empty_without_measurements(recorder: Recorder) -> None:
    recorder.log(1, {"reward/mean": last(1.0)})
    answer = ask(recorder, "/api/collapse")
    assert answer["paths"] == {} and answer["matrix_steps"] == []
    assert answer["gradients"] == {"steps": [], "buckets": []}


def test_a_matrix_has_scores_thoughts_and_prompts(recorder: Recorder) -> None:
    recorder.log(5, {"reward/mean": last(1.0)})
    scores = [[-1.00004, -math.inf], [-3.5, -2.25], [-2.0, -1.5]]
    recorder.cross_scores(5, "first", scores, [0, 1, 1], ["a", "</script>", "c"], ["x", "y"])
    answer = ask(recorder, "/api/matrix", step=5, path="first")
    assert answer["scores"] == [[-1.0, None], [-3.5, -2.25], [-2.0, -1.5]]
    assert answer["own"] == [0, 1, 1]
    assert answer["thoughts"] == ["a", "</script>", "c"] and answer["prompts"] == ["x", "y"]
    assert ask(recorder, "/api/collapse")["matrix_steps"] == [{"step": 5, "path": "first"}]
    with pytest.raises(NotFound, match="no cross-scores of step 4"):
        ask(recorder, "/api/matrix", step=4, path="first")


def test_collapse_omits_steps_that_were_rolled_back(recorder: Recorder) -> None:
    for attempt, steps in enumerate(([1, 2, 3], [3])):
        recorder.attempt = attempt
        for step in steps:
            recorder.log(step, information("first", 1, 10.0 * attempt + step))
            recorder.cross_scores(step, "first", [[-float(attempt)]], [0], ["a"], ["x"])
    answer = ask(recorder, "/api/collapse")
    assert answer["paths"]["first"]["mi"] == [1.0, 2.0, 13.0]
    assert [each["step"] for each in answer["matrix_steps"]] == [1, 2, 3]
    assert ask(recorder, "/api/matrix", step=3, path="first")["scores"] == [[-1.0]]


# ---- repeated phrases


def phrases(recorder: Recorder, words: int = 3) -> dict[str, list[float]]:
    answer = ask(recorder, "/api/phrases", words=words)
    return {each["phrase"]: each["counts"] for each in answer["phrases"]}


def test_a_phrase_is_counted_once_per_thought_and_step(recorder: Recorder) -> None:
    recorder.episodes(
        1, [group_of_thoughts("up we go up we go", "up we go"), group_of_thoughts("down we walk")]
    )
    # Two of three thoughts; a phrase of one thought is not listed.
    assert phrases(recorder) == {"up we go": [pytest.approx(2 / 3, abs=1e-4)]}
    recorder.episodes(2, [group_of_thoughts("up  we\ngo"), group_of_thoughts("up we go")])
    assert phrases(recorder) == {"up we go": [pytest.approx(2 / 3, abs=1e-4), 1.0]}


def test_phrases_of_one_sentence_do_not_overlap_by_two_words(recorder: Recorder) -> None:
    sentence = "the goal is on the right so I go right"
    recorder.episodes(1, [group_of_thoughts(sentence), group_of_thoughts(sentence)])
    # Of its eight phrases of three words, those that share two words with an earlier one are left
    # out.
    listed = list(phrases(recorder))
    assert listed[0] == "the goal is" and len(listed) < 5
    pairs = [set(pairwise(words)) for words in map(str.split, listed)]
    assert all(a.isdisjoint(b) for place, a in enumerate(pairs) for b in pairs[:place])


def test_phrases_of_training_and_evaluation_are_separate(recorder: Recorder) -> None:
    recorder.episodes(1, [group_of_thoughts("a b c"), group_of_thoughts("a b c")])
    recorder.episodes(1, [group_of_thoughts("d e f"), group_of_thoughts("d e f")], phase="eval")
    assert list(phrases(recorder)) == ["a b c"]
    answer = ask(recorder, "/api/phrases", words=3, phase="eval")
    assert [each["phrase"] for each in answer["phrases"]] == ["d e f"]


def test_phrases_are_limited_in_steps_and_number(recorder: Recorder) -> None:
    same = [group_of_thoughts(f"a{i} b{i} c{i}") for i in range(MOST_PHRASES + 5)] * 2
    for step in range(1, MOST_STEPS + 10):
        recorder.episodes(step, same if step == 1 else [group_of_thoughts("x y z")] * 2)
    answer = ask(recorder, "/api/phrases", words=3)
    assert len(answer["steps"]) == MOST_STEPS
    assert (answer["steps"][0], answer["steps"][-1]) == (1, MOST_STEPS + 9)
    assert len(answer["phrases"]) == MOST_PHRASES
    with pytest.raises(Unanswered, match="a phrase has 2 to"):
        ask(recorder, "/api/phrases", words=100)


# ---- before and after


def log_successes(
    recorder: Recorder, step: int, successes: Sequence[bool], phase: str = "eval"
) -> None:
    groups = [group_of_thoughts("t", level=123 + i, success=won) for i, won in enumerate(successes)]
    recorder.episodes(step, groups, phase=phase)


def test_before_and_after_are_paired_by_level(recorder: Recorder) -> None:
    before, after = [True, False, False, False] * 4, [True, True, True, False] * 4
    log_successes(recorder, 0, before)
    log_successes(recorder, 5, [False] * 16)  # Evaluations in between do not count.
    log_successes(recorder, 10, after)
    (gain,) = ask(recorder, "/api/compare")["comparisons"]
    assert (gain["how"], gain["a"]["step"], gain["b"]["step"]) == ("T=1", 0, 10)
    assert (gain["levels"], gain["won"], gain["lost"]) == (16, 8, 0)
    assert (gain["a"]["value"], gain["b"]["value"]) == (0.25, 0.75)
    expected = paired_difference([[float(x) for x in after]], [[float(x) for x in before]])
    assert gain["difference"]["low"] == expected.low > 0
    assert gain["mcnemar_p"] == mcnemar([1] * 8)


def test_only_levels_of_both_evaluations_are_paired(recorder: Recorder) -> None:
    log_successes(recorder, 0, [False, False, True])
    log_successes(recorder, 10, [True, True])
    (gain,) = ask(recorder, "/api/compare")["comparisons"]
    assert (gain["levels"], gain["won"]) == (2, 2)
