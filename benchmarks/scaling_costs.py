"""What driver, sampler, learner and database cost here: what scaling.py starts from.

    python benchmarks/scaling_costs.py                   # JSON; a minute
    python benchmarks/scaling_costs.py --out docs        # into docs/scaling.json
    python benchmarks/scaling_costs.py --ray --models    # the driver's, with messages through Ray
    python benchmarks/scaling_costs.py --publish 1M 30M 135M    # a publication's, by size

All seconds are CPU seconds of one thread, the least of several repeats. The driver plays real
episodes with completions that come at once, so what remains is its own work: prompts, parser,
environment, tasks; then batch, advantages, metrics; then the database. The sampler's and the
learner's are those of the local engine, for a random model: seconds of a forward, of a row and of a
stored key that it reads, fitted on rows and lengths; of a token that is read, scored, updated on.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import growth
import numpy as np
import step
import torch
from scipy.optimize import nnls
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen.algorithms.batch import Batch
from ragen.algorithms.filters import select
from ragen.algorithms.samples import to_samples
from ragen.config.config import Config
from ragen.config.reading import changed, dump
from ragen.core.stopping import run_async
from ragen.core.types import Completion, Episode, Group, Prompt
from ragen.diagnostics.step_metrics import batch_metrics, summarize
from ragen.engines.engine import Engine
from ragen.engines.machine import use_threads
from ragen.engines.player_pool import Order, PlayerPool, PlayerTold
from ragen.engines.pool import Answers, Seat
from ragen.engines.sampler_pool import SamplerPool
from ragen.engines.weights import Block, checksums, pack, take_over
from ragen.models.loading import load_tokenizer
from ragen.rollout.groups import run_groups
from ragen.rollout.policies import fingerprint
from ragen.rollout.setup import EpisodeSpec, Setup, make_chat, make_setup
from ragen.storage.recorder import Recorder
from ragen.training.collection import filter_settings, make_batch, split_batch
from ragen.training.running import make_engine

MODELS: dict[str, Any] = growth.MODELS | {
    "30M": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=4096,
            hidden_size=512,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=1792,
            tie_word_embeddings=False,
        )
    ),
    "135M": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=49_152,
            hidden_size=576,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=1536,
            tie_word_embeddings=True,
        )
    ),
}
PATH = (0, "train", 0)
MESSAGE = 16
"""Episodes in a message of a player."""
WORDS = 95
"""Of the title of an environment's observation, which then has about 200 tokens."""


class Instant:
    """A policy whose completions of so many random tokens come at once."""

    def __init__(self, tokens: int, decode: Callable[[Sequence[int]], str]) -> None:
        source = random.Random(0)
        self._ready: list[Completion] = []
        for _ in range(64):
            ids = tuple(source.randrange(100, 250) for _ in range(tokens))
            logprobs = tuple(-source.random() for _ in ids)
            born = fingerprint(ids, logprobs)
            self._ready.append(Completion(ids, logprobs, decode(ids), "length", 0, born))
        self._next = 0

    async def complete(self, prompt: Prompt) -> Completion:
        """See `Policy.complete`."""
        self._next += 1
        return self._ready[self._next % len(self._ready)]


def config_of(model: Path, work: step.Work, tokens: int = 300, words: int = WORDS) -> Config:
    """A step of GRPO in a lake of long observations; all of it is recorded at each step."""
    settings = {
        "env.name": f"{growth.__file__}:Long",
        "env.params": {"words": words},
        "model.max_length": 4096,
        "rollout.max_tokens": tokens,
        "rollout.slots": min(work.episodes, 128),
    }
    return changed(step.make_config(model, 1, work), settings)


def best(work: Callable[[], Any], repeat: int = 5) -> float:
    """CPU seconds of the fastest of several runs."""
    seconds = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def play(policy: Any, setup: Setup, work: step.Work) -> list[Group]:
    """The groups of one step."""
    levels = range(work.groups)
    played = run_groups(policy, setup, levels, work.members, PATH, work.episodes)
    return run_async(played)


def batch_of(groups: Sequence[Group], config: Config) -> Batch:
    """The groups as the loop would train on them, before any pass of the learner."""
    samples, episodes = to_samples(groups)
    nobody: Any = None  # who would score
    return run_async(make_batch(nobody, samples, episodes, config, score=False))


def at_once(model: Path, work: step.Work, tokens: int) -> tuple[Config, Setup, Instant]:
    """What plays real episodes whose completions come at once; the model is made in a folder."""
    step.make_model(model)
    config = config_of(model, work, tokens)
    chat = make_chat(config, load_tokenizer(model, model))
    return config, make_setup(config, chat), Instant(tokens, chat.decode)


class Ready:
    """A player that has played before: the `Remote` of a `PlayerPool`, 16 episodes a message."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self._episodes = itertools.cycle(episodes)
        self._asked: list[int] = []

    async def submit(self, requests: Sequence[tuple[int, Any]], era: int) -> None:
        """See `Remote.submit`."""
        self._asked += [number for number, _ in requests]

    async def collect(self) -> Answers:
        """See `Remote.collect`."""
        await asyncio.sleep(0)
        numbers, self._asked = self._asked[:MESSAGE], self._asked[MESSAGE:]
        return Answers([*zip(numbers, self._episodes, strict=False)], PlayerTold(0.0, 0.0, {}))

    async def drop(self, numbers: Sequence[int]) -> None:
        """See `Remote.drop`."""


def driver_costs(folder: Path, work: step.Work, tokens: int) -> dict[str, float]:
    """Seconds of the driver for a turn and for an episode, and of the database for an episode.

    ``order_s`` is what an episode costs the driver that a player plays, but for Ray's messages.
    """
    config, setup, policy = at_once(folder / "model", work, tokens)
    with closing(setup):
        groups = play(policy, setup, work)
        turn_s = best(lambda: play(policy, setup, work)) / (work.episodes * work.turns)
        samplers = SamplerPool(1, 1.0, lambda seat, loss: None)
        pool = PlayerPool(samplers, 1.0, lambda seat, loss: None)
        episodes = [episode for group in groups for episode in group.episodes]
        pool.join(Seat("player 0", Ready(episodes)))
        order_s = best(lambda: play(pool, setup, work)) / work.episodes

    def prepare() -> None:
        kept = select(groups, **filter_settings(config.filter, config.advantage))
        batch = batch_of(groups, config)
        split_batch(batch, config.update, 0)
        summarize(groups, kept)
        batch_metrics(batch)

    recorder = Recorder.create(folder, dump(config))

    def record() -> None:
        recorder.episodes(0, groups)
        recorder.commit()
        recorder.forget_after(0, -1)

    with recorder:
        record_s = best(record)
    return {
        "turn_s": turn_s,
        "order_s": order_s,
        "episode_s": best(prepare) / work.episodes,
        "record_s": record_s / work.episodes,
    }


def finish(work: Awaitable[Any]) -> Any:
    """Wait for an engine's answer."""

    async def wait() -> Any:
        return await work

    return run_async(wait())


def prompts_of(rows: int, length: int, tokens: int, first: int = 0) -> list[Prompt]:
    """Different prompts of random ids."""
    source = random.Random(first)
    ids = [tuple(source.randrange(100, 250) for _ in range(length)) for _ in range(rows)]
    return [Prompt((), each, 0, tokens, 1.0, row) for row, each in enumerate(ids)]


async def complete(engine: Engine, prompts: Sequence[Prompt]) -> list[Completion]:
    """The completions of all prompts, asked for at once."""
    return await asyncio.gather(*(engine.policy.complete(prompt) for prompt in prompts))


def sampler_costs(engine: Engine, repeat: int) -> dict[str, float]:
    """Seconds of a forward, a row, a key and a token that is read, fitted with least squares.

    A completion of 17 tokens has 16 forwards more than one of 1 token, whose prompt is read too.
    """
    terms, seconds, read_terms, read_s = [], [], [], []
    for rows in (1, 4, 16, 64):
        for length in (100, 400):

            def sample(tokens: int, rows: int = rows, length: int = length) -> float:
                def work() -> None:
                    engine.forget()
                    finish(complete(engine, prompts_of(rows, length, tokens)))

                return best(work, repeat)

            read = sample(1)
            seconds.append((sample(17) - read) / 16)
            terms.append((1.0, rows, rows * (length + 8)))
            read_s.append(read)
            read_terms.append((1.0, rows * length))
    (forward_s, row_s, key_s), _ = relative_fit(terms, seconds)
    (_, prefill_s), _ = relative_fit(read_terms, read_s)
    return {"forward_s": forward_s, "row_s": row_s, "key_s": key_s, "prefill_s": prefill_s}


def relative_fit(
    terms: Sequence[Sequence[float]], seconds: Sequence[float]
) -> tuple[list[float], float]:
    """The factors ≥ 0 of the terms with the least squares of relative errors, and the worst one.

    Example:
        >>> factors, worst = relative_fit([(1, 1), (1, 2), (1, 4)], [3.0, 5.0, 9.0])
        >>> [round(each, 6) for each in factors], round(worst, 6)
        ([1.0, 2.0], 0.0)
    """
    known = np.array(seconds)
    weighed = np.array(terms, dtype=float) / known[:, None]
    scale = weighed.max(axis=0)
    factors, _ = nnls(weighed / scale, np.ones_like(known))
    factors = factors / scale
    return factors.tolist(), float(np.abs(weighed @ factors - 1).max())


def learner_costs(engine: Engine, setup: Setup, config: Config, repeat: int) -> dict[str, float]:
    """Seconds of an update, and of a token that is scored or updated on.

    A group's common prompt is computed once, so the groups are as large as those of a step.
    """
    played = []
    for groups in (1, 3):  # all are sampled before the weights change
        engine.forget()
        work = step.Work(groups, 16, config.env.max_turns)
        played.append(batch_of(play(engine.policy, setup, work), config))
    terms, score, update = [], [], []
    for batch in played:
        scored = finish(engine.score(batch, "policy"))
        terms.append((1.0, float(batch.lengths_B.sum())))
        score.append(best(lambda batch=batch: finish(engine.score(batch, "policy")), repeat))
        update.append(best(lambda batch=scored: finish(engine.update(batch, 0)), repeat))
    ((score_s,), _) = relative_fit([term[1:] for term in terms], score)
    (fixed_s, update_s), _ = relative_fit(terms, update)
    return {"score_s": score_s, "update_fixed_s": fixed_s, "update_s": update_s}


def engine_costs(
    folder: Path, name: str, repeat: int, words: int = WORDS, turns: int = 2
) -> dict[str, float]:
    """What the sampler and the learner of a random model cost in this process.

    The learner's are those of episodes of so many turns, whose observations have so many words.
    """
    model = folder / name
    step.make_model(model, MODELS[name]())
    settings = {"model.max_length": 1024, "rollout.slots": 64, "rollout.max_tokens": 24}
    config = changed(config_of(model, step.Work(4, 16, turns), 24, words), settings)
    engine = make_engine(config, str(model))
    try:
        with closing(make_setup(config, engine.chat)) as setup:
            costs = sampler_costs(engine, repeat)
            return costs | learner_costs(engine, setup, config, repeat)
    finally:
        finish(engine.close())


def publication_costs(name: str, repeat: int) -> dict[str, float]:
    """What a publication of a random model costs a learner and a sampler, by part.

    The learner packs and computes checksums, and Ray copies the block into shared memory, of which
    ``copy_s`` is the copy alone; the sampler copies it into its model and computes checksums.
    """
    model, own = MODELS[name](), MODELS[name]()
    block = pack(model.named_parameters())
    shared = Block(tuple(part.copy() for part in block.parts), block.entries)
    given = dict(shared.tensors())

    def copy() -> None:
        with torch.no_grad():
            for key, weight in own.named_parameters():
                weight.copy_(given[key])

    return {
        "megabytes": block.num_bytes / 1e6,
        "pack_s": best(lambda: pack(model.named_parameters()), repeat),
        "checksums_s": best(lambda: checksums(model.named_parameters()), repeat),
        "copy_s": best(copy, repeat),
        "take_over_s": best(lambda: take_over(own, shared), repeat),
    }


class Echo:
    """An actor of Ray that answers at once, and reads weights without keeping them."""

    def __init__(self, ready: list[Completion], episodes: list[Episode]) -> None:
        self._ready, self._episodes = ready, episodes

    def complete(self, prompts: list[Prompt]) -> list[Completion]:
        """A completion for each prompt, each another one."""
        return self._ready[: len(prompts)]

    def submit(self, orders: list[Order]) -> int:
        """How many episodes are to be played."""
        return len(orders)

    def collect(self) -> list[Episode]:
        """Episodes that were played."""
        return self._episodes

    def take(self, weights: np.ndarray) -> float:
        """A checksum of all weights."""
        return float(weights.sum())


def ray_costs(
    folder: Path, work: step.Work, tokens: int, megabytes: int = 120, messages: int = 512
) -> dict[str, float]:
    """What messages and publications through Ray cost, without any engine of ours.

    ``message_s`` are the driver's CPU seconds for a prompt of 2,000 tokens and its completion if a
    call carries 16 of them, ``single_message_s`` if it carries one, ``episode_message_s`` those for
    the order of an episode and the episode, 16 in a call; ``publish_s_per_gb`` are the clock's
    seconds of a put, ``read_s`` those of an actor that reads all of it.
    """
    import ray

    _, setup, policy = at_once(folder / "model", work, tokens)
    with closing(setup):
        groups = play(policy, setup, work)
    episodes = [episode for group in groups for episode in group.episodes][:MESSAGE]
    orders = [Order("lake", 0, 1.0, EpisodeSpec(e.level_seed, 0, 0, PATH)) for e in episodes]

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # of `Echo`
    with ray.init("local", num_cpus=2, runtime_env={"env_vars": paths}, **quiet):
        ready = Instant(tokens, str)._ready
        actors = [ray.remote(num_cpus=0)(Echo).remote(ready, episodes) for _ in range(2)]
        prompts, found = prompts_of(16, 2000, tokens), dict[str, float]()
        ray.get([each.complete.remote(prompts) for each in actors])
        for name, size in (("message_s", 16), ("single_message_s", 1)):

            def send(size: int = size) -> None:
                calls = messages // size
                ray.get([actors[n % 2].complete.remote(prompts[:size]) for n in range(calls)])

            found[name] = best(send) / messages

        def carry() -> None:
            calls = messages // len(episodes)
            ray.get([actors[n % 2].submit.remote(orders) for n in range(calls)])
            for n in range(calls):  # not all at once: they take memory
                ray.get(actors[n % 2].collect.remote())

        found["episode_message_s"] = best(carry) / (messages // len(episodes) * len(episodes))
        weights = np.zeros(megabytes * 2**18, dtype=np.float32)
        put, read = [], []
        for _ in range(5):
            start = time.perf_counter()
            reference = ray.put(weights)
            put.append(time.perf_counter() - start)
            for actor in actors:
                start = time.perf_counter()
                ray.get(actor.take.remote(reference))
                read.append(time.perf_counter() - start)
    return found | {"publish_s_per_gb": min(put) * 1000 / megabytes, "read_s": min(read)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["1M", "30M"])
    parser.add_argument("--publish", nargs="*", choices=MODELS, default=[])
    parser.add_argument("--tokens", type=int, default=300, help="of the driver's completions")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ray", action="store_true", help="messages of Ray, too")
    parser.add_argument("--out", type=Path, help="folder for scaling.json")
    args = parser.parse_args()
    kept = args.out / "scaling.json" if args.out else None
    found = json.loads(kept.read_text()) if kept and kept.exists() else {}
    use_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found |= {"driver": driver_costs(folder / "driver", step.Work(), args.tokens)}
        for model in args.models:
            found[model] = engine_costs(folder, model, args.repeat)
        if args.publish:
            found["publication"] = {
                name: publication_costs(name, args.repeat) for name in args.publish
            }
        if args.ray:
            found["ray"] = ray_costs(folder / "ray", step.Work(), args.tokens)
    text = json.dumps(found, indent=1)
    print(text)
    if kept:
        kept.write_text(text + "\n")


if __name__ == "__main__":
    main()
