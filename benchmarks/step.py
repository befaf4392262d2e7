"""One whole training step on the real path of `ragen train`, beside TRL's if asked.

The work of a step is known in advance: 8 levels × 16 episodes, each exactly 5 turns of exactly 24
sampled tokens (no token ends a reply here, so every reply is cut, none is valid and no episode ends
early), about 382 tokens at the end; then one GRPO loss and one AdamW step over
all of them. Environment, prompts, parser and recorder take part as in any run; the mutual
information of thoughts and prompts, which the peer does not measure, is off. The model is that of
the peer's script, Qwen2 with 1.12M random parameters, or a folder's.

All seconds are CPU seconds of the process, on one thread: they can be compared on a shared machine.
The rate of products is measured in the model's dtype.

    python benchmarks/step.py [--steps 10] [--json]
    python benchmarks/step.py --model FOLDER --dtype bfloat16 --members 8 --turns 1 --steps 3
    python benchmarks/step.py --model PATH/bases/frozen-lake-picture --observation picture
    python benchmarks/step.py --peer trl_step.py --peer-python PYTHON_OF_ITS_ENVIRONMENT

With a peer, both run `--rounds` times in turn, each time in a process of its own; medians are
printed. The peer gets the same --model, --maps, --members and --turns, and --dtype if it is not
float32.
"""

# mypy: allow-untyped-calls
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from typing_extensions import override

from ragen.config.config import Config
from ragen.core import user_code
from ragen.core.types import Episode
from ragen.engines import factory
from ragen.envs.worlds.frozen_lake import FrozenLake
from ragen.networks.machine import use_threads
from ragen.sampling.local_sampler import Sampler
from ragen.training import running, trainer
from ragen.training.progress import Watcher

TURN_TOKENS = 24
LENGTH = 382
"""Tokens of an episode of five turns at its end with the default model, the peer's mean; ours may
differ by 5 %."""
WARM_UP = 2
"""Steps at the start of each run that are not counted."""


@dataclass(frozen=True)
class Work:
    """What a step does."""

    groups: int = 8
    members: int = 16
    turns: int = 5
    dtype: str = "float32"
    observation: str = "grid"

    @property
    def episodes(self) -> int:
        return self.groups * self.members

    @property
    def sampled(self) -> int:
        return self.episodes * self.turns * TURN_TOKENS


USUAL = Work()

LOCAL_SAMPLER = factory.Sampler

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Lake(FrozenLake):
    """FrozenLake under a longer title, which brings the prompts to the peer's length."""

    goal = (
        "You are solving the FrozenLake puzzle. Move P to G, avoid O. "
        "Answer with Left, Down, Right or Up, at most five."
    )


def make_model(folder: Path, model: PreTrainedModel | None = None) -> None:
    """A random model, by default of the peer's shape, with a byte-level tokenizer of our words."""
    torch.manual_seed(0)
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    text = f"user\nassistant\n<think>\n{Lake.goal}\nreward 0\ninvalid\nturns 5 actions 10 max 5"
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        [text] * 50,
        trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.08,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    (model or Qwen2ForCausalLM(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def use_model(source: Path, folder: Path) -> None:
    """The weights and words of a model's folder, under the peer's chat template."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file.absolute())
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").unlink()
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = TEMPLATE
    with tempfile.TemporaryDirectory() as saved:
        tokenizer.save_pretrained(saved)
        for name in ("chat_template.jinja", "tokenizer_config.json"):
            (folder / name).write_bytes(Path(saved, name).read_bytes())


def make_config(model: Path, steps: int, work: Work = USUAL) -> Config:
    """StarPO with GRPO's advantage, as a recipe would say it; the peer's loss has no KL either."""
    return Config.model_validate(
        {
            "algorithm": "starpo/grpo",
            "steps": steps,
            "threads": 1,
            "env": {
                "name": f"{__file__}:Lake",
                "max_turns": work.turns,
                "params": {"observation": work.observation},
            },
            "model": {"path": str(model), "max_length": 512, "dtype": work.dtype},
            "rollout": {
                "num_groups": work.groups,
                "group_size": work.members,
                "max_tokens": TURN_TOKENS,
                "slots": work.episodes,
            },
            "advantage": {"name": "grpo"},
            "loss": {"kl": 0.0},
            "update": {"minibatch_episodes": work.episodes, "lr": 1e-3},
            "eval": {"episodes": 0},
            "diagnose": {"information_every": 0},
            "checkpoint": {"every": 0},
        }
    )


class Meter(Watcher):
    """Seconds by phase and lengths of the episodes, step by step."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.steps: list[dict[str, float]] = []
        self.lengths: list[int] = []
        self.prompts: list[int] = []
        self._since = time.process_time()

    @override
    def episode(self, episode: Episode) -> None:
        first, last = episode.turns[0].prompt.token_ids, episode.turns[-1].prompt.token_ids
        assert first is not None and last is not None
        assert [len(turn.completion.token_ids or ()) for turn in episode.turns] == (
            [TURN_TOKENS] * self._work.turns
        )
        self.lengths.append(len(last) + TURN_TOKENS)
        self.prompts.append(len(first))

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.process_time()
        assert step == 1 or metrics["tokens/sampled"] == self._work.sampled
        phases = {
            name.removeprefix("time/"): value
            for name, value in metrics.items()
            if name.startswith("time/") and name != "time/step_s"
        }
        self.steps.append(phases | {"step_s": now - self._since})
        self._since = now


def endless(model: Any, chat: Any, **sizes: int) -> Sampler:
    """The local sampler, with no token that ends a completion: each has `TURN_TOKENS`."""
    never = SimpleNamespace(end_ids=(), control_ids=(), decode=chat.decode)
    return LOCAL_SAMPLER(model, never, **sizes)


def patched_sampler() -> Any:
    """A context in which the local sampler is `endless`."""
    return patch.object(factory, "Sampler", endless)


def operations(
    model: Path, work: Work, lengths: list[int], prompts: list[int] | None = None
) -> float:
    """Floating-point operations of one update: 6·N·tokens and, for attention, 6·D·T² a layer.

    Args:
        model: Folder of the model.
        work: Its groups share their first prompts.
        lengths: Tokens of each episode.
        prompts: Tokens of each one's first prompt: leaves out what need not be done. That is a
            group's prompt in all members but one and, in the last layer, queries and all behind
            them (logits too) at positions whose next token was not sampled.
    """
    config = AutoConfig.from_pretrained(model).get_text_config()
    width, mlp, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    kv_width = width // config.num_attention_heads * config.num_key_value_heads
    kv, rest, head = 2 * width * kv_width, 2 * width**2 + 3 * width * mlp, width * config.vocab_size
    tokens, pairs = float(sum(lengths)), float(sum(length**2 for length in lengths))
    last_layer = tokens
    if prompts is not None:
        shared = 1 - 1 / work.members
        tokens -= shared * sum(prompts)
        pairs -= shared * sum(prompt**2 for prompt in prompts)
        last_layer = work.sampled
    linear = ((layers - 1) * (kv + rest) + kv) * tokens + rest * last_layer + head * work.sampled
    return 6 * linear + 6 * width * pairs * (layers - 1 + last_layer / sum(lengths))


def mm_rate(dtype: torch.dtype) -> float:
    """Operations a second of the best of several 2048³ products."""
    square, seconds = torch.randn(2048, 2048, dtype=dtype), []
    for _ in range(8):
        start = time.process_time()
        square @ square
        seconds.append(time.process_time() - start)
    return 2 * 2048**3 / min(seconds)


def ours(steps: int, work: Work, model: Path | None) -> dict[str, float]:
    """Train in a temporary folder; means over the steps behind the warm-up.

    The recorder keeps tokens at every tenth step, for which they are scored once more: the mean of
    ten steps charges each with its share, a median would hide it.
    """
    use_threads(1)
    rate, meter = mm_rate(getattr(torch, work.dtype)), Meter(work)
    # The loop's own clock by phase, and that of the environments, running on CPU seconds.
    clock = SimpleNamespace(perf_counter=time.process_time)
    with (
        tempfile.TemporaryDirectory() as name,
        patch.object(running, "time", clock),
        patch.object(user_code, "perf_counter", time.process_time),
        patched_sampler(),
    ):
        folder = Path(name, "model")
        if model is None:
            make_model(folder)
        else:
            use_model(model, folder)
        config = make_config(folder, WARM_UP + steps, work)
        trainer.train(config, Path(name, "run"), watcher=meter)
        lengths, prompts = meter.lengths[-work.episodes :], meter.prompts[-work.episodes :]
        needed = operations(folder, work, lengths)
        done = operations(folder, work, lengths, prompts)
    counted = meter.steps[WARM_UP:]
    mean = {name: statistics.mean(step[name] for step in counted) for name in counted[0]}
    mean_length = statistics.mean(lengths)
    if model is None and work.turns == USUAL.turns:
        assert abs(mean_length / LENGTH - 1) <= 0.05, f"episodes of {mean_length} tokens"
    spent = mean["update_s"] * rate
    return {
        "tokens_per_cpu_s_rollout": work.sampled / mean["rollout_s"],
        "tokens_per_cpu_s_step": work.sampled / mean["step_s"],
        "mean_length": mean_length,
        "mean_prompt": statistics.mean(prompts),
        **{name: mean[name] for name in sorted(mean)},
        "mm_gflops": rate / 1e9,
        "update_share_of_mm": needed / spent,
        "update_share_of_mm_done": done / spent,
    }


def last_line(command: Sequence[str], folder: str) -> dict[str, float]:
    """Run a program whose last line of output is JSON."""
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def beside(args: argparse.Namespace) -> dict[str, float]:
    """Ours and the peer in turn; medians of both and their ratios."""
    own = [sys.executable, os.path.abspath(__file__), "--json", "--steps", str(args.steps)]
    own += ["--groups", str(args.groups), "--dtype", args.dtype]
    peer = [str(args.peer_python), str(args.peer.absolute()), "--maps", str(args.groups)]
    for command in (own, peer):
        command += ["--members", str(args.members), "--turns", str(args.turns)]
        if args.model:
            command += ["--model", str(args.model.absolute())]
    if args.dtype != "float32":
        peer += ["--dtype", args.dtype]
    mine, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            mine.append(last_line(own, folder))
            theirs.append(last_line(peer, folder))
    result = {name: statistics.median(run[name] for run in mine) for name in mine[0]}
    for name in ("tokens_per_cpu_s_rollout", "tokens_per_cpu_s_step"):
        result[f"peer_{name}"] = statistics.median(run[name] for run in theirs)
        result[name.replace("tokens_per_cpu_s", "ratio")] = result[name] / result[f"peer_{name}"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="steps that are counted")
    parser.add_argument("--model", type=Path, help="folder of another model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--groups", type=int, default=USUAL.groups)
    parser.add_argument("--members", type=int, default=USUAL.members)
    parser.add_argument("--turns", type=int, default=USUAL.turns)
    parser.add_argument("--observation", default=USUAL.observation, help="the form of the lake")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--peer", type=Path, help="the peer's script")
    parser.add_argument("--peer-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    args = parser.parse_args()
    if args.peer:
        result = beside(args)
    else:
        work = Work(args.groups, args.members, args.turns, args.dtype, args.observation)
        result = ours(args.steps, work, args.model)
    result = {name: float(f"{value:.4g}") for name, value in result.items()}
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:32} {value:>12g}")


if __name__ == "__main__":
    main()
