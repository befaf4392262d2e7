"""Supervised fine-tuning learns its examples, is deterministic, and leaves nothing if it fails."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ragen.finetuning.examples as examples_module
import ragen.finetuning.sft as sft_module
from ragen import evaluate, train
from ragen.bases.demonstrations import NEUTRAL, plan_in_words
from ragen.bases.tokenizer import build
from ragen.chat.chat import Chat
from ragen.chat.prompt import Limits
from ragen.cli.main import main
from ragen.cluster import process_learner
from ragen.cluster.child import Child
from ragen.config.config import Config
from ragen.config.reading import changed, merge
from ragen.config.sections import LossConfig, UpdateConfig
from ragen.core.errors import RagenError
from ragen.core.seeding import SFT_LEVELS
from ragen.core.types import Prompt
from ragen.envs.registry import make
from ragen.finetuning.examples import Examples, Keep, find_player, played_examples
from ragen.finetuning.sft import epoch_minibatches, mean_nll, sft
from ragen.learning.learner import Learner
from ragen.learning.models import Models
from ragen.models.adapter_folder import hash_tensors
from ragen.models.loading import load_policy
from ragen.models.names import is_adapter, resolve_model
from ragen.rollout.players import PlayerPolicy, solver
from ragen.rollout.setup import Setup, make_chat
from ragen.sampling.local_sampler import Sampler
from tests.bandit_model import SETTINGS, bandit_model, settings
from tests.cli.test_bad_input import ROGUE, error_line
from tests.tiny import tiny_tokenizer
from tests.tolerance import LOGPROB


def tiny_config(**more: Any) -> Config:
    """The tiny model that answers Bandit with either arm."""
    return merge("bandit", settings(**more))


def weights(folder: Path) -> str:
    return hash_tensors(AutoModelForCausalLM.from_pretrained(folder).state_dict().items())


def played(
    config: Config, chat: Chat, player: str, episodes: int, keep: Keep | None = None
) -> Examples:
    policy, setup = find_player(config, chat, player)
    found = played_examples(policy, setup, chat, player, episodes, keep, config.seed)
    return found.fitting(config.rollout.max_tokens, config.model.max_length)


def write_conversations(path: Path, count: int, reply: str = "<answer>Dragon</answer>") -> Path:
    """Write a file of identical Bandit conversations."""
    prompt = "Bandit\nArms: Dragon, Phoenix\nturns 1 actions 1 max 1"
    line = {"messages": [{"role": "user", "content": prompt}]}
    line["messages"].append({"role": "assistant", "content": reply})
    path.write_text(f"{json.dumps(line)}\n" * count)
    return path


@pytest.mark.slow
def test_the_embedded_model_learns_from_the_solver(tmp_path: Path) -> None:
    out = tmp_path / "models" / "tuned"
    tuned = sft(merge("bandit", {"threads": 1}), out, episodes=128, epochs=5)
    assert tuned.model == out and [path.name for path in out.parent.iterdir()] == ["tuned"]
    # A tenth of 128 is held out; five epochs of 115 ÷ 32 ≈ 4 steps each.
    assert (tuned.examples, tuned.held_out, tuned.steps) == (115, 13, 20)
    assert tuned.lr == pytest.approx(5e-3) and tuned.unsolved == tuned.too_long == 0
    assert tuned.nll_before > 3 and tuned.nll_after < 0.05
    after = evaluate(out, {"env": "bandit", "threads": 1}, episodes=64)
    assert after.success_low > 0.9 and after.valid_fraction == 1


@pytest.mark.slow
def test_all_weights_are_trained_further_after_an_adapter_is_merged(tmp_path: Path) -> None:
    shape = {"lora__rank": 4, "lora__alpha": 8}
    tuned = sft(tiny_config(**shape), tmp_path / "tuned", episodes=20, epochs=2)
    assert is_adapter(tuned.model) and not (tuned.model / "model.safetensors").exists()
    assert tuned.nll_after < tuned.nll_before
    merged = tiny_config(model__path=str(tuned.model), steps=1, eval__episodes=2)
    assert train(merged, out=tmp_path / "run").after is not None


def test_the_same_call_gives_the_same_weights(tmp_path: Path) -> None:
    for name in ("a", "b"):
        sft(tiny_config(), tmp_path / name, episodes=12, epochs=2)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


@pytest.mark.slow
def test_two_processes_train_what_one_does_and_repeat_bit_for_bit(tmp_path: Path) -> None:
    config = tiny_config()
    two = changed(config, {"engine.processes": 2})
    alone, first, second = (
        sft(each, tmp_path / str(number), episodes=12, epochs=2)
        for number, each in enumerate((config, two, two))
    )
    assert weights(first.model) == weights(second.model)
    assert first.nll_before == pytest.approx(alone.nll_before, abs=1e-6)
    assert first.nll_after == pytest.approx(alone.nll_after, abs=LOGPROB)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_process_that_is_killed_or_has_other_weights_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(engine__processes=2)
    begin, children = Child.begin, dict[Child, None]()

    def killing(child: Child, method: str, *arguments: Any, **named: Any) -> Any:
        children[child] = None
        call = begin(child, method, *arguments, **named)
        if arguments[:1] == ("update",) and arguments[2] == 1:
            child.kill()
        return call

    with monkeypatch.context() as patched:
        patched.setattr(Child, "begin", killing)
        with pytest.raises(RagenError, match=r"process 2 of 2 has ended \(killed, perhaps"):
            sft(config, tmp_path / "out", episodes=12)
    with monkeypatch.context() as patched:
        patched.setattr(process_learner, "checksums", lambda _: {"policy.weight": 0})
        with pytest.raises(RagenError, match="process 2 of 2 are not those of the first: after tr"):
            sft(config, tmp_path / "out", episodes=12)
    assert not list(tmp_path.iterdir()) and not torch.distributed.is_initialized()
    assert children and all(each._process.wait(10) for each in children)


def test_conversations_teach_their_replies(tmp_path: Path) -> None:
    messages: list[str] = []
    data = write_conversations(tmp_path / "talks.jsonl", 20)
    tuned = sft(
        tiny_config(), tmp_path / "tuned", str(data), epochs=6, lr=1e-2, watch=messages.append
    )
    # The model answers with either arm: ln 2 nats for the name, among about six certain tokens.
    assert tuned.nll_after < 0.2 * tuned.nll_before
    assert (tuned.examples, tuned.held_out) == (18, 2)
    assert "20 conversations (left out: 0" in messages[1] and "lr 0.01" in messages[1]
    assert messages[-1].startswith(f"step {tuned.steps}/{tuned.steps}  nll ")
    levels = evaluate(tmp_path / "tuned", SETTINGS | {"env": "bandit"}, episodes=16)
    assert levels.success == 1  # Dragon is the better arm


def test_held_out_loss_is_the_mean_over_the_trained_tokens(tmp_path: Path) -> None:
    """By hand: log softmax of the model's own logits at the tokens of the mask."""
    model, tokenizer = load_policy(bandit_model(), "cpu", "float32")
    examples = played(tiny_config(), Chat(tokenizer, think=False), "solver", 4)
    batch = examples.batch(examples.kept)
    learner = Learner(Models(model), UpdateConfig(), LossConfig(name="nll"))
    with torch.no_grad():
        logprobs_BTV = model(batch.token_ids_BT).logits.log_softmax(-1)
    logprobs = [
        float(logprobs_BTV[row, column - 1, batch.token_ids_BT[row, column]])
        for row, column in batch.mask_BT.nonzero().tolist()
    ]
    assert mean_nll(learner, batch) == pytest.approx(-sum(logprobs) / len(logprobs), abs=LOGPROB)


def test_every_example_is_used_once_per_epoch() -> None:
    tokenizer = tiny_tokenizer()
    sizes = settings(model__max_length=512, rollout__max_tokens=64)
    config = merge("frozen-lake-still", sizes)
    examples = played(config, Chat(tokenizer, think=False), "solver", 9)
    training, held_out = examples.split(seed=3)
    assert len(held_out) == 1 and held_out[0] in examples.kept
    assert [each for each in examples.kept if each in training + held_out] == examples.kept
    batch = examples.batch(training)
    parts = list(epoch_minibatches(batch, 3, 2, seed=0))
    seen = [int(e) for part in parts for e in part.episode_B.unique()]
    assert len(parts) == 2 * round(8 / 3) and sorted(seen) == sorted(2 * list(range(len(training))))
    assert seen[: len(training)] != seen[len(training) :]  # in another order


# Random play, and play of a run.


def test_random_play_is_kept_whatever_came_of_it_and_leans_to_no_action() -> None:
    config = merge("bandit", {"rollout.max_tokens": 200, "model.max_length": 4096})
    chat = Chat(tiny_tokenizer("chatml"))
    examples = played(config, chat, "random", 64)
    assert (len(examples.kept), examples.unsolved) == (64, 0) and "no skill" in examples.shows
    replies = [example[0][1].text for example in examples.kept]
    thoughts = [reply.partition("</think>")[0] for reply in replies]
    assert set(thoughts) == set(NEUTRAL)
    chosen = [reply.partition("<answer>")[2].partition("<")[0] for reply in replies]
    assert 16 <= chosen.count(chosen[0]) <= 48
    won = played(config, chat, "random", 64, "solved")
    assert 0 < len(won.kept) < 64 == len(won.kept) + won.unsolved
    again = played(config, chat, "random", 64)
    assert again.kept == examples.kept


@pytest.mark.parametrize("env", ["frozen-lake", "sokoban"])
def test_a_teacher_shows_optimal_play_in_the_thoughts_of_the_embedded_models(env: str) -> None:
    config = merge(env)
    _, tokenizer = load_policy(resolve_model("base", env), "cpu", "float32")
    chat = make_chat(config, tokenizer)
    every = played(config, chat, "teacher", 8, "all")
    won = played(config, chat, "teacher", 8, "solved")
    assert len(won.kept) >= (2 if env == "frozen-lake" else 7), "optimal play; on ice with luck"
    own = make(env, **config.env.params)
    for level, example in enumerate(every.kept, SFT_LEVELS):
        own.reset(seed=level, options={"noise_seed": 0})
        reading = own.read_thought(example[0][1].text.partition("</think>")[0])
        assert reading is not None and reading.true == reading.stated > 0


@pytest.mark.parametrize("env", ["frozen-lake", "sokoban"])
def test_a_wanderer_describes_the_map_and_moves_at_random(env: str) -> None:
    """Its thought tells where things are; each of the actions follows in a tenth or more."""
    config = merge(env, {"prompt.style": "paper", "env.params.observation": "coord"})
    config = changed(config, {"rollout.max_tokens": 400, "model.max_length": 4096})
    chat = Chat(tiny_tokenizer("chatml"))
    examples = played(config, chat, "wanderer", 12)
    assert examples.unsolved == examples.too_long == 0 and "no skill" in examples.shows
    actions = []
    for example in examples.kept:
        for prompt, reply in example:
            thought, written = reply.text.split("</think><answer>")
            actions.append(written.removesuffix("</answer>"))
            assert thought.endswith(f"I go {actions[-1]}.")
            state = prompt.messages[-1]["content"]
            here = re.search(r"Player: (\(.*?\))", state)
            assert here and thought.startswith(f"I am at {here[1]}.")
            (goal,) = re.findall(r"(?:Goal|Targets): (\(.*?\))", state)
            assert f"at {goal} is" in thought
    batch = examples.batch(examples.kept)
    every = replace(examples, trained={}).batch(examples.kept).mask_BT
    left_out = batch.token_ids_BT[every & ~batch.mask_BT].tolist()
    chosen = [chat.encode_text(f" {action}") for action in actions]
    assert left_out == [token for tokens in chosen for token in tokens], "only the choices"
    shares = [actions.count(action) / len(actions) for action in make(env).actions or ()]
    assert len(shares) == 4 and min(shares) > 0.1 and sum(shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("env", "player", "more", "complaint"),
    [
        ("bandit", "wanderer", {}, "a wanderer plays frozen-lake, and sokoban with one box"),
        ("sokoban", "wanderer", {"env.params.boxes": 2}, "a wanderer plays frozen-lake, and sok"),
        ("bandit", "teacher", {}, "there is no teacher for bandit, only for"),
        ("sokoban", "teacher", {"prompt.think": False}, "set prompt.think = true"),
        ("sokoban", "teacher", {"prompt.prefill": False}, "prompt.prefill = true"),
        ("sokoban", "teacher", {"env.params.boxes": 2}, "pushes one box only: take --player solv"),
    ],
)
def test_a_player_says_what_it_needs(
    env: str, player: str, more: dict[str, Any], complaint: str
) -> None:
    config = merge(env, more)
    with pytest.raises(RagenError, match=complaint):
        played(config, make_chat(config, build()), player, 2)


def test_a_run_teaches_its_solved_episodes(bandit_run: Path, tmp_path: Path) -> None:
    tuned = sft(tiny_config(), tmp_path / "tuned", str(bandit_run), episodes=24, epochs=1)
    kept = tuned.examples + tuned.held_out
    assert 0 < kept < 24 == kept + tuned.unsolved
    text = (tmp_path / "tuned" / "README.md").read_text(encoding="utf-8")
    assert f"{kept} {bandit_run} episodes (left out: {tuned.unsolved} unsolved" in text
    assert f"{tuned.held_out} of them held out. Only successes of {bandit_run} play" in text


def test_levels_are_reserved_temperature_is_1_without_terms_and_a_model_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "terms.py").write_text("def praise(turn):\n    return 1.0\n")
    setups, closed = list[Setup](), list[Sampler]()
    run_groups = examples_module.run_groups

    async def spy(policy: Any, setup: Setup, levels: Any, *rest: Any) -> Any:
        setups.append(setup)
        assert list(levels) == [SFT_LEVELS + index for index in range(4)]
        return await run_groups(policy, setup, levels, *rest)

    async def close(sampler: Sampler) -> None:
        closed.append(sampler)

    monkeypatch.setattr(examples_module, "run_groups", spy)
    monkeypatch.setattr(Sampler, "close", close)
    terms = {f"{tmp_path}/terms.py:praise": 0.5}
    config = tiny_config(reward__terms=terms, rollout__temperature=0.5)
    _, tokenizer = load_policy(bandit_model(), "cpu", "float32")
    for player in (str(bandit_model()), "random"):
        played(config, make_chat(config, tokenizer), player, 4, "all")
    assert [(setup.temperature, setup.reward_terms) for setup in setups] == 2 * [(1.0, {})]
    assert len(closed) == 1


def test_a_player_with_other_tokens_is_refused(tmp_path: Path) -> None:
    config = merge("bandit", {"rollout.max_tokens": 80, "env.max_turns": 1})
    with pytest.raises(
        RagenError, match=r"the tokens of base are not those of the model.*FILE\.jsonl"
    ):
        played(config, Chat(tiny_tokenizer("chatml")), "base", 4, "all")


# The solver's episodes.


def test_solver_writes_its_plan_as_thought_and_answer() -> None:
    lake = make("frozen-lake-still")
    lake.reset(seed=123)
    prompt, limits = Prompt((), None, 0, 64, 1.0, 0), Limits(1, 5, 10, 5)
    for start, rest in (("", "<think>try "), ("<think>", "try "), ("<think>\n", "try ")):
        policy = PlayerPolicy(lambda _: solver, prefill=start, thought=plan_in_words)
        reply = policy.act(lake, Limits(1, 5, 10, 5), prompt)
        plan = lake.solve(5, 10, 5)
        assert len(plan) > 2
        assert reply.text == (
            f"{rest}{' then '.join(plan)}</think><answer>{' || '.join(plan)}</answer>"
        )
    text = PlayerPolicy(lambda _: solver, think=False).act(lake, limits, prompt).text
    assert text == f"<answer>{' || '.join(plan)}</answer>"


@pytest.mark.parametrize(
    ("template", "prefill"),
    [("chatml", True), ("qwen3", False), ("llama2", False), ("thinker", True)],
)
def test_solver_episodes_are_solved_with_every_chat_template(template: str, prefill: bool) -> None:
    more = {"prompt.style": "paper", "prompt.prefill": prefill, "env.actions_per_turn": 1}
    sizes = {"rollout.max_tokens": 200, "model.max_length": 16384}
    config = merge("sokoban", more | sizes)
    examples = played(config, Chat(tiny_tokenizer(template)), "solver", 2)
    assert (len(examples.kept), examples.unsolved) == (2, 0)


# Mistakes and failures.

COMPACT = ("--prompt.style", "compact", "--prompt.think", "false")
"""With them, the recipe bandit takes `bandit_model`."""

MUTE = """
from tests.rogue import Rogue
class Mute(Rogue):
    def solve(self, turns_left, actions_left, actions_per_turn):
        return None
"""


def test_interrupted_or_failed_sft_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("step"):
            assert not (tmp_path / "tuned").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sft(tiny_config(), tmp_path / "tuned", episodes=8, watch=interrupt)
    real = sft_module.learn

    def spoil(learner: Learner, *arguments: Any) -> None:
        real(learner, *arguments)
        for weights in learner.model.parameters():
            weights.data.fill_(torch.nan)

    monkeypatch.setattr(sft_module, "learn", spoil)
    with pytest.raises(RagenError, match=r"not finite after .* steps: set a lower --lr"):
        sft(tiny_config(), tmp_path / "tuned", episodes=8)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(RagenError, match=r"cannot write .* name a folder that can be written"):
        sft(tiny_config(), tmp_path / "file" / "tuned", episodes=8)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--episodes", "1"), "--episodes: expected a whole number from 2"),
        (("--update.lr", "1e-3"), "set --lr"),
        (("--loss.kl", "0.1"), "loss.kl has no effect on supervised fine-tuning"),
        (
            ("--rollout.max_tokens", "3", "--episodes", "8"),
            "0 solver episodes (left out: 0 unsolved, 8 too",
        ),
        (("--player", "none.jsonl"), "cannot read none.jsonl: no such file"),
        (("--player", "wandere"), "random, wanderer, solver, teacher, a FILE.jsonl, or a hub id"),
        (("--player", "talks", "--episodes", "3"), "leave out --episodes and --keep"),
        (
            ("--env", f"{ROGUE}:Rogue", "--env.max_actions", "1", "--quiet", "--episodes", "8"),
            "8 unsolved, 0 too long); at least two are needed",
        ),
        (
            ("--env", "mute.py:Mute", "--quiet"),
            "no solver; give conversations to learn from with --player FILE",
        ),
        (("--out", "talks"), "talks exists already"),
    ],
)
def test_mistakes_give_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], complaint: str
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write_conversations(tmp_path / "talks", 3)
    (tmp_path / "mute.py").write_text(MUTE)
    start = ("sft", "bandit", "--model", bandit_model(), *COMPACT)
    out = () if "--out" in arguments else ("--out", "tuned")
    assert complaint in error_line(tmp_path, *start, *out, *arguments)


def test_conversations_come_through_a_pipe_and_too_long_ones_are_left_out(tmp_path: Path) -> None:
    """``--player /dev/stdin`` reads those of another command."""
    lines = write_conversations(tmp_path / "talks", 3).read_text()
    long = f"<answer>{'Dragon ' * 20}</answer>"
    lines += write_conversations(tmp_path / "talks", 2, reply=long).read_text()
    os.mkfifo(pipe := tmp_path / "pipe")
    Thread(target=pipe.write_text, args=[lines], daemon=True).start()
    tuned = sft(tiny_config(), tmp_path / "tuned", str(pipe), epochs=1)
    assert (tuned.examples + tuned.held_out, tuned.too_long) == (3, 2)


def test_sft_command_prints_a_record_or_the_next_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the LoRA options, training would merge the adapter into all weights."""
    sizes = ["--rollout.max_tokens", "10", "--model.max_length", "128", "--threads", "1"]
    keys = ["--model", str(bandit_model()), *COMPACT, *sizes, "--episodes", "12", "--epochs", "1"]
    out = tmp_path / "tuned"
    assert main(["sft", "bandit", "--out", str(out), *keys, "--json"]) == 0
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    assert record["model"] == str(out) and record["held_out"] == 1
    assert record["nll_after"] < record["nll_before"]
    assert "12 solver episodes (left out: 0" in shown.err
    shape = ["--lora.rank", "4", "--lora.alpha", "8"]
    assert main(["sft", "bandit", "--out", str(tmp_path / "b"), *keys, *shape, "--quiet"]) == 0
    shown = capsys.readouterr()
    evaluate, train = shown.out.splitlines()[-2:]
    options = " --prompt.style compact --prompt.think false --rollout.max_tokens"
    assert f"ragen eval {tmp_path / 'b'} --env bandit" in evaluate and options in evaluate
    assert f"ragen train bandit --model {tmp_path / 'b'}" in train and options in train
    assert " ".join(shape) in train and "lora" not in evaluate
    assert "--threads" not in evaluate + train and shown.err == ""
