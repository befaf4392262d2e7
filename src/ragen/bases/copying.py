"""Demonstrations for environments of free text, and weights that begin with copying.

An action of free text names what is on the screen, such as words to search for. A base of random
weights does not learn to copy in minutes, so its attention begins as heads that copy
(`write_induction`). One lesson repeats random words, so that the heads stay general; only the
second half is trained::

     boots the Hexley boots the Hexley</think><answer>…

The other lesson replies with random play and without a thought::

     -</think><answer>click[buy now]</answer>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragen.bases.demonstrations import Piece, Reply, answer
from ragen.bases.screen import Choose
from ragen.chat.prompt import Limits
from ragen.envs.contract import Env, pick

REPEATED = 24
NOTHING = " -"
EMBEDDING = 0.1
NEAR, BEFORE, MATCH, COPY = 6.0, 3.0, 4.0, 60.0
"""Strengths of induction heads: of looking at earlier tokens, writing, finding and copying them."""
SPELLING = 0.5
"""Size of the vector that a space before a word adds to its embedding, relative to `EMBEDDING`."""
NORM = 3.0
"""Factor on the last norm, with which logits of small embeddings are large enough for copying."""
ROPE_THETA = 10_000.0
"""Base of the rotary embedding: words have to be found at the other end of a page."""


class Copier:
    """Teachers for free text: one repeats `words`, one plays; `choose` chooses their actions."""

    taught, note = "to repeat words", "Heads that copy were written into its attention before."
    theta, highest = ROPE_THETA, 0

    def __init__(self, words: Sequence[str], choose: Choose) -> None:
        self.words, self.choose = words, choose

    def repeat(self, env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        """Write random words twice, and then an answer; the first time is not trained."""
        words = "".join(f" {pick(generator, self.words)}" for _ in range(REPEATED))
        chosen = answer(self.choose(env, limits, generator))
        return [Piece(words, trained=False), Piece(f"{words}{chosen}")]

    def act(self, env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        """Random play without a thought."""
        return [Piece(f"{NOTHING}{answer(self.choose(env, limits, generator))}")]

    def sum_up(self, env: Env, generator: np.random.Generator) -> Reply:
        """A summary that tells nothing."""
        return [Piece(f"{NOTHING}{answer([NOTHING.strip()])}")]

    def thought(self, screen: str) -> str:
        """The thought of a player."""
        return NOTHING


def write_words(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a word similar embeddings with and without a space before it, and freeze all embeddings.

    So the model copies one spelling as it learned to copy the other. Embeddings that are trained
    drift apart, and copies become guesses.
    """
    rows: Any = model.get_input_embeddings().weight
    norm: Any = model.model.norm.weight
    with torch.no_grad():
        rows.copy_(EMBEDDING * torch.randn(rows.shape))
        space = SPELLING * EMBEDDING * torch.randn(rows.shape[1])
        numbers = tokenizer.get_vocab()
        for word, row in numbers.items():
            if word[0] == " " and len(word) > 2 and word[1:] in numbers:
                rows[row] = rows[numbers[word[1:]]] + space
        norm.mul_(NORM)
    rows.requires_grad_(False)


def write_induction(model: PreTrainedModel) -> None:
    """Initialise the attention of the first two layers as heads that copy (arXiv:2209.11895).

    At each token, two heads of the first layer look at the token before and at the one before that,
    and write their embeddings into subspaces. Heads of the second layer look for earlier places of
    the same tokens and add the embedding of what followed there, so the model continues a passage
    that it has seen. In a head, half of the frequencies of the rotary embedding encode places, and
    half encode words.
    """
    config: Any = model.config
    layers: Any = model.model.layers
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    width, each = config.hidden_size // heads, heads // groups
    half, theta = width // 2, config.rope_parameters["rope_theta"]
    frequencies = theta ** (-torch.arange(half) / half)
    fast = torch.arange(half) < half // 2
    slow = torch.cat([~fast, ~fast])[:, None]

    def turned(places: int) -> Tensor:
        angles = places * frequencies
        return NEAR * torch.cat([fast * torch.cos(angles), fast * torch.sin(angles)])

    subspaces = torch.linalg.qr(torch.randn(config.hidden_size, config.hidden_size))[0].T
    word, last, earlier = subspaces.reshape(-1, width, config.hidden_size)[:3]
    first, second = (layer.self_attn for layer in layers[:2])
    with torch.no_grad():
        first.q_proj.weight[: each * width] = 0.0
        first.k_proj.weight[:width] = 0.0
        first.k_proj.bias[:width] = turned(0)
        first.v_proj.weight[:width] = word
        for head, target in enumerate((last, earlier)):
            rows = slice(head * width, (head + 1) * width)
            first.q_proj.bias[rows] = turned(-1 - head)
            first.o_proj.weight[:, rows] = EMBEDDING * BEFORE * target.T
        for group, (asked, found) in enumerate(((word, last), (last, earlier))):
            rows = slice(group * width, (group + 1) * width)
            columns = slice(group * each * width, (group + 1) * each * width)
            second.q_proj.weight[columns] = MATCH * (asked * slow).repeat(each, 1)
            second.k_proj.weight[rows] = MATCH * found * slow
            second.v_proj.weight[rows] = word
            copied = EMBEDDING * COPY / each * word.T
            second.o_proj.weight[:, columns] = copied.repeat(1, each)
