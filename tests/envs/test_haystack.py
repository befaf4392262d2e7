"""Haystack: films, looks under a budget, and the steps of T* by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ragen.envs.registry import make
from ragen.envs.tools import write_call
from ragen.envs.worlds.haystack.film import COLOURS, FORMS, NEAR, agreement, generate
from ragen.envs.worlds.haystack.players import (
    detect,
    distribution,
    draw,
    first_frames,
    oracle,
    sampling_weights,
    spread,
    tstar,
    uniform,
    with_target,
)


def begin(**params):
    """Level 123: the moment is 143 to 145, and the answer is red."""
    env = make("haystack", **{"frames": 200, **params})
    env.reset(seed=123)
    return env


def look(start, end, n):
    return write_call("look", start=start, end=end, n=n)


# Films.


@pytest.mark.parametrize("frames", [200, 601])
def test_a_film_shows_its_target_once_in_its_scene_near_its_cue(frames):
    for seed in range(30):
        film = generate(seed, frames, 0.1)
        assert len(film.shown) == len(film.glimpsed) == frames
        seen = [film.seen(frame, True) for frame in range(frames)]
        assert [frame for frame in range(frames) if film.target in seen[frame]] == [*film.moment]
        assert all(seen[frame][0] == film.backdrop for frame in film.moment)
        first, last = film.moment[0], film.moment[-1]
        near = range(max(first - NEAR, 0), min(last + NEAR + 1, frames))
        assert all(film.cue in seen[frame] for frame in near)
        backdrops = [words[0] for words in seen]
        cuts = [at for at in range(1, frames) if backdrops[at] != backdrops[at - 1]]
        scenes = np.diff([0, *cuts, frames])
        assert scenes.min() >= 20 and scenes[:-1].max() <= 60


def test_glimpses_miss_and_invent_forms_as_often_as_told():
    true = glimpsed = missed = invented = 0
    for seed in range(10):
        film = generate(seed, 1000, 0.2)
        for shown, glimpse in zip(film.shown, film.glimpsed, strict=True):
            assert shown >> 6 == glimpse >> 6
            true += (shown & 63).bit_count()
            missed += (shown & ~glimpse & 63).bit_count()
            invented += (glimpse & ~shown & 63).bit_count()
            glimpsed += 6
    assert missed / true == pytest.approx(0.2, abs=0.02)  # about 5,000 forms
    assert invented / (glimpsed - true) == pytest.approx(0.02, abs=0.003)
    assert generate(3, 200, 0.0).shown == generate(3, 200, 0.0).glimpsed


def test_temporal_f1():
    assert agreement([140], range(140, 143)) == (1.0, 1.0, 1.0)
    assert agreement([134, 149], range(140, 143)) == (0.0, 0.0, 0.0)
    # 136 reaches 140 and 141 of three frames, 10 and 20 reach none: P = 1/3, R = 2/3.
    assert agreement([10, 20, 136], range(140, 143)) == pytest.approx((1 / 3, 2 / 3, 4 / 9))


# Play.


def test_a_search_pays_for_its_frames_and_earns_by_its_answer():
    env = begin()
    shown, reward, *_ = env.step(look(0, 199, 8))
    assert reward == pytest.approx(-8 * 0.005) and shown.endswith("\n56 frames left")
    assert [int(line.split()[0]) for line in shown.splitlines()[:-1]] == [
        *(0, 28, 56, 85, 113, 142, 170, 199)
    ]
    shown, reward, *_ = env.step(write_call("zoom", frame=143))
    assert "red square" in shown and reward == -0.005
    # 138 reaches 143 alone: P = 1/2, R = 1/3.
    shown, reward, terminated, _, info = env.step("red 138 20")
    assert terminated and shown == "Right, F1 0.40" and reward == pytest.approx(1.4)
    assert info == {"success": True, "effective": True}
    assert env.solve(1, 1, 1) == ["red 143 144 145"]


def test_what_cannot_be_done_costs_nothing():
    env = begin(budget=4)
    before = env.get_state()
    for action, message in (
        (look(0, 199, 5), "Error: you may see 4 more frames, not 5"),
        (look(9, 5, 2), "Error: start is after end"),
        (look(0, 200, 2), "Error: the last frame is 199"),
        (write_call("zoom", frame=200), "Error: the last frame is 199"),
        (look(0, 9, 65), "Error: n: Input should be less than or equal to 64"),
        ("blue", "Answer with a colour and 1 to 8 frames, such as red 40 41."),
        ("green 40", "Answer with"),
        ("red 40 200", "Answer with"),
        ("red 1 2 3 4 5 6 7 8 9", "Answer with"),
        ("red 40 and 41", "Answer with"),
    ):
        shown, reward, terminated, _, info = env.step(action)
        assert shown.startswith(message) and not terminated and not info["effective"]
        assert reward == 0.0 and env.get_state() == before


def test_words_are_calls():
    tools, words = begin(), begin(calls="words")
    assert not words.tools and "look START END N" in words.rules
    for action, same in (
        ("look 0 199 8", look(0, 199, 8)),
        ("zoom 4", '{"name": "zoom", "arguments": {"frame": 4}}'),
        ("red 4", "red 4"),
        ("look 0 199", "look"),
    ):
        assert words.step(action) == tools.step(same)


def test_a_look_is_one_picture_of_its_frames():
    env = begin(observation="picture")
    assert env.pictures() == []
    shown = env.step(look(0, 199, 5))[0]
    assert shown == "Frames 0 49 99 149 199\n59 frames left\n<image>"
    (mosaic,) = env.pictures()
    assert mosaic.shape == (2 * 18, 3 * 26, 3)  # a place of 8 pixels for each of 2 × 3 forms
    assert not mosaic[18:, 52:].any()  # five of six cells
    assert env.step("no answer")[0].endswith("\n<image>")  # of the last look
    env.step(write_call("zoom", frame=143))
    (close,) = env.pictures()
    assert close.shape == (34, 50, 3)
    red = (close == [0xD0, 0x20, 0x20]).all(-1)
    assert red.any() and not (mosaic == [0xD0, 0x20, 0x20]).all(-1).any()
    assert red[:18, 17:34].sum() == red.sum()  # the place of the square


# T*, by hand.


class Half:
    """A generator whose numbers are all 0.5."""

    def random(self):
        return 0.5


def test_the_first_round_is_evenly_spaced():
    assert first_frames(11, 4) == [0, 2, 4, 6]
    assert first_frames(600, 16) == [*range(0, 593, 37)][:16]


def test_confidence_is_weighted():
    film = generate(123, 200, 0.0)
    assert (film.target, film.backdrop, film.cue) == ("square", "brown", "star")
    # The middles of 0.3 to 0.9 and of 0.6 to 1, once for the target and half for cues.
    assert detect(film, 143, False, Half()) == pytest.approx(
        {"brown": 0.3, "square": 0.6, "star": 0.3}
    )
    assert detect(film, 143, True, Half()) == pytest.approx(
        {"brown": 0.4, "square": 0.8, "star": 0.4}
    )


def test_the_top_quarter_spreads():
    sampled, confidences = [0, 3, 6, 9], np.array([0.1, 0.2, 0.8, 0.1])
    scores = np.zeros(12)
    scores[sampled] = confidences
    spread(scores, sampled, confidences)  # the 75th percentile is 0.35: frame 6 alone
    assert scores == pytest.approx(
        [0.1, 0.8 / 6, 0.8 / 5, 0.2, 0.8 / 3, 0.4, 0.8, 0.4, 0.8 / 3, 0.2, 0.8 / 5, 0.8 / 6]
    )


def test_the_spline_becomes_a_distribution():
    scores, unvisited = np.array([0.0, 0.1, 0.2, 0.3, 0.0]), np.array([0, 0, 0, 0, 1], bool)
    # A cubic through four points on a line is the line, 0.4 in frame 4; below 1/5 it is 1/5.
    raised = 1 / (1 + np.exp([-0.2, -0.2, -0.2, -0.3, -0.4]))
    assert distribution(scores, unvisited) == pytest.approx(raised / raised.sum())
    assert raised / raised.sum() == pytest.approx(
        [0.1948, 0.1948, 0.1948, 0.2035, 0.2121], abs=1e-4
    )


def test_the_next_round_comes_from_the_top_quarter():
    chances = np.array([0.05, 0.05, 0.05, 0.05, 0.1, 0.2, 0.2, 0.3])
    unvisited = np.array([1, 1, 1, 1, 1, 1, 1, 0], bool)
    # With 1/8: 0.175 four times, 0.225, 0.325 twice, 0; the 75th percentile is 0.25.
    found = sampling_weights(chances, unvisited, 1)
    assert found == pytest.approx([0, 0, 0, 0, 0, 0.325, 0.325, 0])
    assert sampling_weights(chances, unvisited, 3) == pytest.approx(chances + 3 / 8)


def test_draws_are_successive_ones_without_replacement():
    generator = np.random.Generator(np.random.PCG64(0))
    drawn = [tuple(draw(np.array([1.0, 0.0, 2.0, 5.0]), 2, generator)) for _ in range(4000)]
    # 1/8 · 2/7 for (0, 2), 5/8 · 2/3 for (3, 2); standard deviations 0.003 and 0.008.
    assert drawn.count((0, 2)) / 4000 == pytest.approx(1 / 28, abs=0.012)
    assert drawn.count((3, 2)) / 4000 == pytest.approx(5 / 12, abs=0.032)
    assert draw(np.array([0.0, 1.0]), 2, generator) == [1]


def test_searches_keep_to_their_frames_and_tstar_stops_when_it_has_found_the_target():
    for seed in range(40):
        film = generate(seed, 600, 0.0)
        for player in (uniform, tstar, oracle):
            found = player(film, 64, 8, np.random.Generator(np.random.PCG64(seed)))
            assert len(set(found.named)) == len(found.named) <= 8 and found.num_seen <= 64
            is_seen = [film.target in film.seen(each, True) for each in found.closely]
            named = with_target(film, found).named
            assert any(is_seen) == any(film.target in film.seen(each, True) for each in named)
            if player is tstar:
                rounds, others = divmod(found.num_seen - len(found.closely), 16)
                assert others == 0 and 1 <= rounds <= 3
                if {*first_frames(600, 16)} & {*film.moment}:  # a close look is confident enough
                    assert rounds == 1 and is_seen[0]


def test_a_second_look_tells_an_invented_target_from_a_real_one():
    film = generate(123, 600, 0.0)
    assert not {*first_frames(600, 16)} & {*film.moment}
    bit = 1 << FORMS.index(film.target)
    invented = replace(film, glimpsed=(film.glimpsed[0] | bit, *film.glimpsed[1:]))
    found = tstar(invented, 25, 8, np.random.Generator(np.random.PCG64(0)))
    # 16 frames, one of which is seen again, in vain; no second round fits into the 17 before the
    # 8 that are named. The second look left frame 0 with the score of its backdrop.
    assert found.closely[0] == 0 and found.num_seen == 16 + 1 + 8 == 16 + len(found.closely)


def test_random_play_looks_zooms_and_answers_what_it_sees():
    env, generator = begin(calls="words"), np.random.Generator(np.random.PCG64(0))

    def played():
        return {env.random_action(generator) for _ in range(200)}

    assert played() == {"look 0 199 8"}
    env.step("look 0 199 2")
    assert played() == {"look 0 199 8", "zoom 0", "zoom 199"}
    env.step("zoom 4")
    assert played() == {"look 0 199 8", *(f"{colour} 4" for colour in COLOURS)}
    env.step("zoom 143")
    assert played() == {"look 0 199 8", "red 143"}
