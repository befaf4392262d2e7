"""The command ``ragen doctor MODEL``: a model's prompts and cost, as a page in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby, takewhile

from rich.console import Console
from rich.text import Text

from ragen.chat.prompt import prefill as prefill_of
from ragen.core.tables import Section, show
from ragen.evaluation.inspection import REPLIES, Inspection, Piece

MOST_TOKENS = 8


def show_model(console: Console, found: Inspection) -> None:
    """Print what was found out about a model."""
    show(console, [_facts(found)])
    env = found.config.env.name
    _title(console, f"The first prompt in {env}, {_count(found.prompt)}, as the model reads it")
    console.print(_spelled(found.prompt), soft_wrap=True)
    played = "One turn" if found.turns == 1 else f"{found.turns} turns"
    _title(console, f"{played} of random play; ⟦ ⟧ enclose the tokens that are trained")
    known = found.prompt
    for sample in found.samples:
        pairs = zip(known, sample, strict=False)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        console.print(Text(f"[{_count(sample[:same])} as above]", "dim"), end="")
        console.print(_spelled(sample[same:]), soft_wrap=True)
        known = sample
    turns = "turn is" if found.turns == 1 else f"{found.turns} turns are"
    samples = "one sample" if len(found.samples) == 1 else f"{len(found.samples)} samples"
    console.print(Text(f"The {turns} {samples}: {found.why}."))
    show(console, [_memory(found)])
    reply = found.reply
    verdict = f"not valid: {reply.problem}"
    if reply.problem is None:
        verdict = f"valid: {' || '.join(reply.actions)}"
    temperature = found.config.rollout.temperature
    _title(console, f"A sampled reply to the prompt, {reply.num_tokens} tokens, T={temperature:g}")
    console.print(Text(reply.text), soft_wrap=True)
    console.print(Text(verdict, "bold"))


def _title(console: Console, text: str) -> None:
    console.print(Text(f"\n{text}", "bold"))


def _count(pieces: Iterable[Piece]) -> str:
    return f"{sum(piece.num_tokens for piece in pieces)} tokens"


def _spelled(pieces: Iterable[Piece]) -> Text:
    """Tokens as text: brackets around trained ones, colours for them and for control tokens."""
    text = Text()
    for trained, run in groupby(pieces, key=lambda piece: piece.trained):
        text.append("⟦" if trained else "", "bold green")
        for piece in run:
            style = "cyan" if piece.control else ""
            text.append(piece.text, f"green {style}".split()[-1] if trained else style)
        text.append("⟧" if trained else "", "bold green")
    return text


def _facts(found: Inspection) -> Section:
    """The architecture, tokens and prompts of a model."""
    config, (together, alone) = found.config, found.tokens_per_s
    prompt = config.prompt
    prefill = f", {prefill_of(prompt.think)} pre-filled" if prompt.prefill else ""
    if found.loses_blanks:
        prefill += "; a message loses the white space that it begins with"
    header = [("before a reply", f"{found.header!r}, as in the history")] if found.header else []
    rows = (
        ("model", f"{found.architecture}, {found.parameters / 1e6:.1f} M parameters"),
        ("dtype", f"stored in {found.stored}, computed in {config.model.dtype} on {found.device}"),
        ("decoder", found.decoder),
        (
            "speed",
            f"{REPLIES} replies at once {together:.0f} tokens/s, one {alone:.0f}",
        ),
        ("ends a turn", _named(found.end)),
        ("padding", _named(found.pad) or "none"),
        ("control tokens", f"{len(found.controls)}: {_named(found.controls)}"),
        *header,
        *([("pictures", found.pictures)] if found.pictures else []),
        ("prompts", f"{prompt.style}{prefill}"),
        (
            "lengths",
            f"a reply up to {config.rollout.max_tokens} tokens, with its prompt "
            f"{config.model.max_length}",
        ),
    )
    return Section(found.target, (), ("", ""), rows)


def _named(tokens: Mapping[str, int]) -> str:
    """Tokens with their ids, at most `MOST_TOKENS` of them."""
    shown = [f"{text} ({token})" for text, token in tokens.items()]
    return ", ".join(shown[:MOST_TOKENS]) + (", …" if len(shown) > MOST_TOKENS else "")


def _memory(found: Inspection) -> Section:
    config = found.config
    free = "" if found.free is None else f"; {found.free:.1f} GiB are free on {found.device}"
    title = f"Memory for training in GiB{free}"
    line = (
        f"Peak: {config.rollout.slots} episodes at once of {config.model.max_length} tokens, and "
        f"{config.update.microbatch_tokens} tokens a microbatch."
    )
    rows = tuple(
        (
            f"{row.method}, {'LoRA' if row.adapters else 'all weights'}",
            row.dtype,
            f"{row.certain:.1f}",
            f"{row.peak:.1f}",
            row.verdict,
        )
        for row in found.memory
    )
    columns = ("method", "dtype", "weights and optimiser", "peak", "")
    return Section(title, (line,), columns, rows)
