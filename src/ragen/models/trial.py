"""A program that tries a folder's chat template and tokenizer, with limited time and memory.

`ragen.models.loading` runs this file in a separate process. A template is a program from outside:
it may loop forever, and one expression may ask for all memory. The trial renders short and
long conversations and encodes the results. It imports only jinja2 and tokenizers.

It exits with 0 if every step is quick and no token has too large an id. A template may refuse a
conversation; a later check decides whether RAGEN can use it. After a failure, the last line on
standard error says what went wrong.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

MOST_S = 0.5
"""Processor time of one rendering, or of encoding one text; common templates take milliseconds."""
MOST_S_IN_ALL = 10
"""Processor time of the whole trial, after which the system ends it."""
MOST_BYTES = 2**30
"""Memory beyond that in use at the start, and `BYTES_PER_BYTE` for each byte of tokenizer.json."""
BYTES_PER_BYTE = 32
MOST_CHARACTERS = 100_000
"""What a template may write besides the messages."""
MOST_IDS = 2**24
"""The largest id of a token: tables of tokens end there. Large vocabularies have 10**5 to 10**6."""

MESSAGES = 40
LONG = "<think>Go (0, 1) | then {left} </think>\n<answer>Up\t1+1=2</answer> é🙂 " * 10
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What `ragen.rollout.template` reports as a refusal."""


class Generation(Extension):
    """The block ``{% generation %}`` that transformers knows, which adds nothing to the text."""

    tags = {"generation"}  # noqa: RUF012 (as in the base class)

    def parse(self, parser: Parser) -> Node:
        """The block's content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:
        return str(caller())


def conversations() -> Iterator[list[dict[str, str]]]:
    """Trial conversations: short, with a system text, with a reply, long, and of many messages."""
    system = [{"role": "system", "content": "S"}]
    for head, content, count in (
        *(([], "Q", 1), (system, "Q", 1), ([], "Q", 3)),
        *(([], LONG, 1), ([], LONG, MESSAGES + 1), (system, LONG, MESSAGES + 1)),
    ):
        roles = ["assistant" if index % 2 else "user" for index in range(count)]
        yield head + [{"role": role, "content": content} for role in roles]


def templates(folder: Path) -> Iterator[str]:
    """Every chat template of a folder."""
    for path in (folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")):
        if path.is_file():
            yield path.read_text("utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = settings(folder / name).get("chat_template")
        for each in found if isinstance(found, list) else [found]:
            text = each.get("template") if isinstance(each, dict) else each
            if isinstance(text, str):
                yield text


def settings(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is missing or holds something else."""
    content = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def renderings(source: str, tokens: dict[str, str]) -> Iterator[tuple[str, int]]:
    """What a template writes for each trial conversation, and how long its messages are."""

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    jinja.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    jinja.globals["raise_exception"] = refuse
    day = date(2025, 1, 1)
    start = time.process_time()
    try:
        template = jinja.from_string(source)
    except REFUSALS:
        return
    be_quick(start, "compiling it takes more than {} s")
    for think in (True, False):
        for messages in conversations():
            start = time.process_time()
            try:
                text = template.render(
                    messages=messages,
                    tools=None,
                    documents=None,
                    add_generation_prompt=True,
                    enable_thinking=think,
                    strftime_now=day.strftime,
                    **tokens,
                )
            except REFUSALS:
                continue
            finally:
                be_quick(start, "it takes more than {} s for a conversation")
            yield text, sum(len(message["content"]) for message in messages)


def be_quick(start: float, complaint: str) -> None:
    """End the program if more processor time than `MOST_S` has passed since `start`."""
    if time.process_time() - start > MOST_S:
        sys.exit(complaint.format(f"{MOST_S:g}"))


def limit_resources(tokenizer: Path) -> None:
    """Limit the processor time of this process, and on Linux its memory."""
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_S_IN_ALL, MOST_S_IN_ALL))
    statistics = Path("/proc/self/statm")
    if statistics.is_file():
        used = int(statistics.read_text().split()[0]) * resource.getpagesize()
        size = tokenizer.stat().st_size if tokenizer.is_file() else 0
        most = used + MOST_BYTES + BYTES_PER_BYTE * size
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard == resource.RLIM_INFINITY or most < hard:
            resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(folder: Path) -> None:
    """Try all templates of `folder` with its tokenizer."""
    file = folder / "tokenizer.json"
    limit_resources(file)
    encode = None
    if file.is_file():
        tokenizer = Tokenizer.from_file(str(file))
        largest = max(tokenizer.get_vocab().values(), default=0)
        if largest > MOST_IDS:
            sys.exit(f"tokenizer.json: a token has the id {largest}, of at most {MOST_IDS}")
        encode = tokenizer.encode
    read = settings(folder / "tokenizer_config.json")
    tokens = {
        name: str(token.get("content") if isinstance(token, dict) else token)
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (token := read.get(name)) is not None
    }
    for source in templates(folder):
        for text, length in renderings(source, tokens):
            if len(text) > MOST_CHARACTERS + 4 * length:
                sys.exit(f"it writes {len(text)} characters around {length}")
            if encode is not None:
                start = time.process_time()
                encode(text, add_special_tokens=False)
                be_quick(start, "the tokenizer takes more than {} s for a conversation")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
