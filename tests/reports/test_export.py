"""Export of a policy: the same weights, the same prompts, and a card with its results."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ragen.chat.chat import Chat
from ragen.chat.template import dated
from ragen.cli.main import main
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.pictures import PLACE
from ragen.core.seeding import EVAL_LEVELS
from ragen.core.stopping import run_async
from ragen.engines.factory import load_model
from ragen.evaluation.evaluation import evaluate_target
from ragen.evaluation.results import RunEvaluation
from ragen.models.loading import load_policy
from ragen.reports.card import Usage, card, front_matter, how_to_use, origin, until
from ragen.reports.export import export, usage_of
from ragen.reports.facts import Facts, read_facts
from ragen.rollout.episode import play_episode
from ragen.rollout.setup import EpisodeSpec, make_setup
from ragen.settings.saved import run_config
from ragen.storage.checkpoint import checkpoint_of, newest, read_state, write_state
from ragen.storage.database import DATABASE
from ragen.training.trainer import train
from tests.bandit_model import settings
from tests.cli.test_cli import evaluation
from tests.pictured import seeing_chat
from tests.records import edit_settings
from tests.scripted_policy import ScriptedPolicy
from tests.tiny import TEMPLATES, tiny_tokenizer
from tests.tolerance import assert_close

Capture = pytest.CaptureFixture[str]
SILENT = ScriptedPolicy(lambda _: "")
PROBE = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture
def run(own_bandit_run: Path) -> Path:
    """A run of three steps that a test may change: all checkpoints, and an evaluation of each."""
    return own_bandit_run


@pytest.fixture(scope="module")
def exported(bandit_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last policy of `bandit_run`, exported. Read only."""
    return export(bandit_run, tmp_path_factory.mktemp("exported") / "bandit")


def blocks(folder: Path) -> list[str]:
    """The Python examples of a card."""
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text("utf-8"), re.DOTALL)


def test_transformers_loads_exactly_the_policy(bandit_run: Path, exported: Path) -> None:
    policy, _ = load_policy(newest(bandit_run), "cpu", "float32")
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.dtype == torch.float32  # the format in which it was trained
    with torch.no_grad():
        assert torch.equal(model(PROBE).logits, policy(PROBE).logits)
    same = "model.safetensors"
    assert (exported / same).read_bytes() == (newest(bandit_run) / same).read_bytes()
    names = {path.name for path in exported.iterdir()}
    assert {"README.md", "config.json", "chat_template.jinja", "tokenizer.json"} <= names
    assert not {name for name in names if "optimizer" in name or "state" in name}


def test_a_run_that_took_the_place_of_its_first_model_has_an_origin(own_bandit_run: Path) -> None:
    first = run_config(own_bandit_run).model.path
    edit_settings(own_bandit_run, f'path = "{first}"', f'path = "{own_bandit_run}"')
    assert origin(str(own_bandit_run)) == str(own_bandit_run)


def test_card_example_uses_the_prompt_of_the_run(
    bandit_run: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(exported)
    names: dict[str, Any] = {}
    exec(blocks(exported)[0], names)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    chat, config = Chat(tokenizer, think=False), read_facts(bandit_run).config
    setup = make_setup(config, chat)
    episode = run_async(play_episode(SILENT, setup, EpisodeSpec(EVAL_LEVELS, 0, 0, (0, "x"))))
    prompt_ids = episode.turns[0].prompt.token_ids
    assert tuple(names["prompt"]["input_ids"][0].tolist()) == prompt_ids
    sampled = names["output"][0, len(prompt_ids or ()) :]
    assert 0 < len(sampled) <= config.rollout.max_tokens
    assert not set(sampled[:-1].tolist()) & chat.end_ids  # it stops where a turn ends


@pytest.mark.parametrize(("prefill", "think"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("template", TEMPLATES)
def test_card_usage_matches_the_run_prompt_with_every_template(
    template: str, prefill: bool, think: bool
) -> None:
    tokenizer = tiny_tokenizer(template)
    more = {"prompt.prefill": prefill, "prompt.think": think, "model.max_length": 9999}
    config = merge("paper/bandit", more)
    chat = Chat(tokenizer, think)
    usage = usage_of(make_setup(config, None), chat, tokenizer.chat_template, config.seed)
    messages = [dict(message) for message in usage.messages]
    options = {name: eval(value) for name, value in usage.options.items()}
    exported = dated(tokenizer.chat_template)
    text = tokenizer.apply_chat_template(
        messages, chat_template=exported, tokenize=False, add_generation_prompt=True, **options
    )
    asked, header = usage.header
    text = text.removesuffix(asked) + header + usage.start
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    episode = run_async(
        play_episode(SILENT, make_setup(config, chat), EpisodeSpec(123, 0, 0, (0, "x")))
    )
    assert tuple(ids) == episode.turns[0].prompt.token_ids
    assert usage.start in ("", make_setup(config, chat).prefill)


def test_generation_config_samples_as_the_evaluation_does(run: Path) -> None:
    text = (run / "config.toml").read_text()
    (section,) = re.findall(r"\[eval\][^\[]*", text)
    edit_settings(run, section, section.replace("temperature = 1.0", "temperature = 0.5"))
    generation = GenerationConfig.from_pretrained(export(run))
    assert (generation.do_sample, generation.temperature) == (True, 0.5)
    assert (generation.top_k, generation.top_p, generation.max_new_tokens) == (0, 1.0, 10)
    assert generation.eos_token_id == [0, 1]  # <|endoftext|> and the template's <|im_end|>


def test_card_reports_results_and_settings(bandit_run: Path, exported: Path) -> None:
    text = (exported / "README.md").read_text("utf-8")
    for words in (
        f"# {bandit_run.name}\n",
        "| random play | 50.0% |",
        "| optimal play | 100.0% |",
        "step 0, T=1",
        "step 3, T=1",
        "step 0, greedy",
        "step 3, greedy",
        "Environment bandit; budgets: turns 1, actions per turn 1, actions per episode 1.",
        "Training: 3 steps of starpo-s/grpo, recipe bandit, seed 0.",
        "| exactness/tokens_checked |",
        "## Alarms and actions",
        "| update.lr | 1e-06 | 0.001 |",
        "Arms: Dragon, Phoenix",
        "text += '<answer>'",
        "vllm serve .",
    ):
        assert words in text
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert {"ragen", "bandit", "starpo-s"} <= set(data.tags)
    assert data.license is None and data.base_model is None
    path = read_facts(bandit_run).config.model.path
    assert str(bandit_run.parent) not in text and path not in text


def test_card_of_an_earlier_step_omits_later_results(run: Path) -> None:
    with closing(sqlite3.connect(run / DATABASE)) as connection, connection:
        connection.execute("DELETE FROM evaluations WHERE step = 1")
    facts = until(read_facts(run), 1)
    assert {each.step for each in facts.evaluations} == {0}
    assert all(max(series) <= 1 for series in facts.metrics.values())
    text = (export(run, step=1) / "README.md").read_text("utf-8")
    assert "Weights: those of step 1. The last evaluation is that of step 0." in text
    assert "step 3" not in text


def card_of(folder: Path, values: dict[str, Any], *evaluations: RunEvaluation, **known: Any) -> str:
    """The card of a run in `folder` with these settings, which tells nothing of the folder."""
    facts = Facts(folder, merge(None, values), {}, evaluations, (), {}, **known)
    text = card(facts, 2, Usage())
    assert str(folder) not in text
    return text


def in_envs(step: int, success: float, envs: Sequence[str]) -> RunEvaluation:
    """An evaluation of a mixture."""
    parts = tuple(replace(evaluation(success), env=env) for env in envs)
    return RunEvaluation(0, step, replace(evaluation(success), parts=parts))


def test_card_compares_level_by_level_in_each_environment_of_a_mixture(tmp_path: Path) -> None:
    envs = ("bandit", f"{tmp_path}/w.py:World")
    successes = {
        ("eval", step): {(env, level): success for env in envs for level in range(64)}
        for step, success in ((0, 0.0), (2, 1.0))
    }
    evaluated = in_envs(0, 0.0, envs), in_envs(2, 1.0, envs)
    text = card_of(tmp_path, {"env.mix": dict.fromkeys(envs, 1)}, *evaluated, successes=successes)
    assert "## Success in w.py:World" in text
    assert text.count("points [") == text.count(", level by level") == 3


def test_card_does_not_tell_where_a_judge_or_the_files_of_an_environment_lie(
    tmp_path: Path,
) -> None:
    judge = {"reward.terms.judge": 0.5, "judge.rubric": "It looks first."}
    for model, url, shown in (
        (f"{tmp_path}/models/critic", "", "critic"),
        ("some/critic", "", "some/critic"),
        ("/served/critic", "http://localhost:1/v1", "/served/critic"),  # a server's own name
    ):
        text = card_of(tmp_path, judge | {"judge.model": model, "judge.url": url})
        assert f"| judge.model |  | {shown} |" in text
    words = {"path": f"{tmp_path}/own/words.jsonl", "attempts": 2}
    shop = {"params": {"path": "../own/shop.json", "files": [f"{tmp_path}/own/a.txt"]}}
    mixed = card_of(tmp_path, {"env.mix": {"webshop": {"share": 0.5, **shop}, "bandit": 0.5}})
    alone = card_of(tmp_path, {"env.name": "word-problems", "env.params": words})
    assert "words.jsonl" in alone and "shop.json" in mixed and "a.txt" in mixed
    assert "own" not in alone + mixed


def test_card_tells_files_of_one_name_in_two_folders_apart(tmp_path: Path) -> None:
    envs = [f"{tmp_path}/{folder}/env.py:Maze" for folder in ("small", "large")]
    envs += ["gymnasium:ALE/Pong-v5", f"openenv:{tmp_path}/served.py:app"]
    terms = {f"{tmp_path}/{folder}/env.py:brevity": 0.5 for folder in ("small", "large")}
    settings = {"env.mix": dict.fromkeys(envs, 1), "reward.terms": terms}
    text = card_of(tmp_path, settings, in_envs(0, 0.5, envs))
    for env in ("gymnasium:ALE/Pong-v5", "openenv:served.py:app", "small/env.py:Maze"):
        assert f"## Success in {env}" in text
    assert "large/env.py:Maze" in text
    assert "small/env.py:brevity" in text and "large/env.py:brevity" in text


def test_card_names_the_base_model_of_the_first_run(run: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    config = (run / "config.toml").read_text()
    hub = re.sub(r'(?<=\npath = )".*?"', '"Qwen/Qwen2.5-0.5B-Instruct"', config)
    (first / "config.toml").write_text(hub)
    [path] = re.findall(r'\npath = ".*?"', config)
    edit_settings(run, path, f'\npath = "{first}"')
    text = (export(run) / "README.md").read_text("utf-8")
    assert ModelCard(text).data.base_model == "Qwen/Qwen2.5-0.5B-Instruct"
    assert "Base model: Qwen/Qwen2.5-0.5B-Instruct. Training: 3 steps" in text
    assert "| model.path | base | first |" in text


def test_export_can_be_evaluated_as_a_model(bandit_run: Path, exported: Path) -> None:
    shared = {
        key: value for key, value in settings().items() if key.startswith(("prompt", "model"))
    }
    overrides = shared | {"env.name": "bandit", "threads": 1, "model.path": str(exported)}
    again, original = (
        evaluate_target(str(target), overrides, episodes=4, temperature=1.0)[0]
        for target in (exported, bandit_run)
    )
    assert again.mean_return == original.mean_return


def test_step_and_best_select_the_checkpoint(run: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "mine"
    assert main(["export", str(run), "--out", str(out), "--step", "2"]) == 0
    assert f"the policy is in {out}; its README.md" in capsys.readouterr().out
    best = read_state(newest(run))["loop"]["best_step"]
    for out, options, step in ((None, {"step": 1}, 1), (tmp_path / "b", {"best": True}, best)):
        folder = export(run, out, **options)
        source = checkpoint_of(run, step)
        assert source is not None
        weights = "model.safetensors"
        assert (folder / weights).read_bytes() == (source / weights).read_bytes()


def test_a_mistake_gives_one_line_and_leaves_nothing(run: Path, capsys: Capture) -> None:
    def refused(options: str, words: str) -> None:
        before = sorted(run.rglob("*"))
        assert main(["export", str(run), *options.split()]) == 2
        output = capsys.readouterr()
        assert words in output.err and output.err.count("\n") == 1 and output.out == ""
        assert sorted(run.rglob("*")) == before

    refused("--step 9", "has no checkpoint of step 9; it has those of steps 0, 1, 2, 3")
    refused("--best --step 1", "not allowed with argument")
    refused("--merge", "has no adapter to merge: leave --merge out")
    (run / "export-step-3").mkdir()
    refused("", "export-step-3 exists already; name a folder that does not")
    (run / "export-step-3").rmdir()
    refused(f"--out {run / 'config.toml'}/b", "cannot write")
    state = read_state(newest(run))
    write_state(newest(run), state | {"loop": state["loop"] | {"best_success": -1.0}})
    refused("--best", "was evaluated: leave --best out")
    (newest(run) / "model.safetensors").write_bytes(b"spoilt")
    refused("", "step-3/model.safetensors is damaged (it is not what was written); restore it, or ")
    shutil.rmtree(run / "checkpoints")
    refused("", "has no checkpoint")
    shutil.rmtree(run)
    refused("", "is not a run folder: config.toml is missing")


def test_full_disk_leaves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(GenerationConfig, "save_pretrained", full)
    before = sorted(run.rglob("*"))
    with pytest.raises(RagenError, match="no space left on device; free space there"):
        export(run)
    assert sorted(run.rglob("*")) == before


VLLM_SCRIPT = """
import re, sys
blocks = re.findall(r"```python\\n(.*?)```", open("README.md").read(), re.DOTALL)
here = "LLM(folder, dtype='float32', enforce_eager=True, max_model_len=512, block_size=32)"
exec(blocks[0] + blocks[1].replace("LLM(folder)", here))
from vllm import SamplingParams
usual = llm.get_default_sampling_params()
assert (usual.temperature, usual.top_k, usual.top_p, usual.max_tokens) == (1.0, 0, 1.0, 24)
outputs = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=24))
mine = model.generate(prompt["input_ids"], do_sample=False)[0, len(ids) :].tolist()
print("result", list(outputs[0].outputs[0].token_ids) == mine, reply.endswith("</answer>"))
"""


@pytest.mark.vllm
def test_vllm_example_of_the_card_generates_as_transformers_does(tmp_path: Path) -> None:
    """In a separate process, because environment variables make vLLM run on a CPU."""
    small = {"steps": 1, "eval.episodes": 2, "rollout.num_groups": 2, "threads": 1}
    folder = export(train(merge("bandit", small), tmp_path / "run").run)
    on_cpu = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", VLLM_SCRIPT],
        cwd=folder,
        env=os.environ | on_cpu,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "result True True" in done.stdout, done.stderr[-2000:]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with LoRA."""
    more: dict[str, Any] = {"lora__rank": 4, "lora__alpha": 8, "update__lr": 0.1, "steps": 1}
    config = merge("bandit", settings(**more, eval__episodes=2))
    return train(config, tmp_path_factory.mktemp("adapter") / "adapted").run


def logits_of(run: Path) -> torch.Tensor:
    """The policy's logits for the probe, with its adapter not merged."""
    model, _ = load_model(read_facts(run).config.model, str(newest(run)))
    with torch.no_grad():
        return model(PROBE).logits


def test_adapter_is_exported_as_an_adapter(
    adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export(adapted, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(folder)  # transformers finds the base and peft
    with torch.no_grad():
        assert_close(model(PROBE).logits, logits_of(adapted))
    text = (folder / "README.md").read_text("utf-8")
    assert ModelCard(text).data.library_name == "peft"
    assert "LLM('BASE', enable_lora=True, max_lora_rank=4, generation_config=folder)" in text
    assert "--lora-modules policy=. --generation-config ." in text
    assert not (folder / "model.safetensors").exists()
    # The example samples as the run does, not as the base model's generation config says.
    of_base = GenerationConfig.from_pretrained(read_facts(adapted).config.model.path)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(blocks(folder)[0], names)
    used = names["model"].generation_config
    assert (used.temperature, used.top_k, used.max_new_tokens) == (1.0, 0, 10)
    assert used.max_new_tokens != of_base.max_new_tokens


def test_merged_adapter_is_exported_as_a_model(adapted: Path, tmp_path: Path) -> None:
    folder = export(adapted, tmp_path / "merged", merge=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert_close(model(PROBE).logits, logits_of(adapted))
    base = AutoModelForCausalLM.from_pretrained(read_facts(adapted).config.model.path)
    with torch.no_grad():
        assert not torch.allclose(model(PROBE).logits, base(PROBE).logits, atol=1e-3)
    assert not list(folder.glob("adapter_*"))
    assert "library_name: transformers" in (folder / "README.md").read_text("utf-8")


def test_the_card_of_a_policy_that_reads_pictures() -> None:
    config = merge(None, {"env.name": "tests/seeing_envs.py:Seen", "prompt.style": "paper"})
    chat = seeing_chat()
    with closing(make_setup(config, None)) as setup:
        usage = usage_of(setup, chat, "", config.seed)
    assert usage.pictures
    text = how_to_use(None, usage)
    assert "You see <image>." in text and "AutoModelForImageTextToText" in text
    assert "pipeline_tag: image-text-to-text" in front_matter((), None, usage)
    assert PLACE not in text and "AutoModelForCausalLM" not in text
