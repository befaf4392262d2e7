"""The base of environments of free text: its lessons, and weights that begin with copying."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from ragen.bases.base import LessonPlayer, new_model
from ragen.bases.copying import (
    REPEATED,
    ROPE_THETA,
    Copier,
    write_induction,
    write_words,
)
from ragen.bases.curriculum import Lesson, Stage
from ragen.bases.screen import random_actions
from ragen.bases.tokenizer import build, words_for
from ragen.chat.chat import Chat
from ragen.envs.registry import env_factory
from ragen.rollout.setup import Setup

SHOP = env_factory("webshop", on_page=3, numbered=True)
WORDS = [f"word{number}x" for number in range(500)]


def test_a_lesson_trains_the_second_of_two_equal_passages_and_the_answer() -> None:
    chat, copier = Chat(build(words_for(WORDS, 20))), Copier(WORDS, random_actions)
    setup = Setup("shop", SHOP, actions=2, actions_per_turn=1, window=1)
    passages = set()
    for teacher in (copier.repeat, copier.act):
        stage = Stage("copying", 1, (Lesson(teacher, setup, turns=(2,), held_out=False),), 4)
        samples = LessonPlayer(chat, 0).samples(stage, 0, 0)
        assert len(samples) == 8, "a sample for each turn, as a prompt shows one"
        for sample in samples:
            tokens = list(zip(sample.token_ids, sample.loss_mask, strict=True))
            reply = chat.decode([token for token, _ in tokens]).partition("<think>")[2]
            learned = chat.decode([token for token, on in tokens if on])
            thought, _, said = learned.partition("</think><answer>")
            assert said.startswith(("search[", "click["))
            if teacher == copier.act:
                assert thought == " -" and reply.startswith(thought)
            else:
                assert len(thought.split()) == REPEATED and set(thought.split()) <= set(WORDS)
                assert reply.startswith(thought + learned)
                passages.add(thought)
    assert len(passages) == 8


def test_the_spellings_of_a_word_are_alike_and_not_trained() -> None:
    tokenizer = build(words_for(["boots", "tea"], 1))
    model = new_model(tokenizer, 1, 0)
    write_words(model, tokenizer)
    weight = model.get_input_embeddings().weight
    assert not weight.requires_grad
    boots, spaced, tea, other = (
        weight[tokenizer.convert_tokens_to_ids(word)] for word in ("boots", " boots", "tea", " tea")
    )
    assert torch.allclose(spaced - boots, other - tea, atol=1e-6)
    alike = partial(torch.nn.functional.cosine_similarity, dim=0)
    assert alike(boots, spaced) > 0.9 and abs(alike(boots, tea)) < 0.5


def test_a_model_continues_a_passage_that_it_has_seen_before_any_training() -> None:
    """Random words, twice: seven in ten of the second half are foreseen."""
    tokenizer = build(words_for(WORDS, 1))
    model = new_model(tokenizer, 3, 0, theta=ROPE_THETA)
    write_words(model, tokenizer)
    first = tokenizer.convert_tokens_to_ids(f" {WORDS[0]}")
    generator = np.random.Generator(np.random.PCG64(0))
    rows = [first + generator.permutation(len(WORDS))[:60] for _ in range(8)]
    twice = torch.tensor(np.array([[*row, *row] for row in rows]))

    def foreseen() -> float:
        with torch.no_grad():
            guesses = model(twice).logits[:, 60:-1].argmax(-1)
        return float((guesses == twice[:, 61:]).float().mean())

    assert foreseen() < 0.05
    write_induction(model)
    assert foreseen() > 0.7
