"""The GPU gives the same numbers as the CPU.

Each test also compares the CPU with itself, so that the tests themselves are checked where there is
no GPU. Tests without a GPU use the device ``meta``, which has shapes but no numbers: there, an
operation that would wait for the GPU or that mixes devices is an error.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import waits
from ragen.algorithms.batch import collate
from ragen.config.config import Config
from ragen.config.reading import merge
from ragen.config.sections import LossConfig, UpdateConfig
from ragen.core.types import Completion, Prompt, Sample
from ragen.learning.learner import Learner
from ragen.learning.models import Models
from ragen.models.loading import load_policy, recompute_layers
from ragen.networks import packed
from ragen.networks.decoder import HFDecoder, make_decoder
from ragen.sampling.local_sampler import Sampler
from ragen.storage.checkpoint import newest
from ragen.storage.reader import read_metrics
from ragen.training.trainer import resume, train
from tests.bandit_model import bandit_model, settings
from tests.learning.recorded import batch_for, config_of, gradients, relative
from tests.learning.test_learner import PLAIN, batch
from tests.networks.test_packed import build
from tests.tiny import ends, tiny_model, tiny_tokenizer
from tests.tolerance import LOGPROB

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    ],
)
TOKENS = 6
"""Tokens of a completion."""

DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])
FLOAT32, BFLOAT16 = (torch.float32, LOGPROB), (torch.bfloat16, 0.03)
KINDS = pytest.mark.parametrize(
    ("device", "dtype", "atol"),
    [
        ("cpu", *BFLOAT16),
        *(pytest.param("cuda", *each, marks=CUDA.marks) for each in (FLOAT32, BFLOAT16)),
    ],
)


def model(device: str, dtype: torch.dtype) -> Any:
    return tiny_model(tiny_tokenizer("chatml")).to(torch.bfloat16).to(device, dtype)


def learner(
    device: str,
    dtype: torch.dtype,
    recomputes: bool = False,
    muon_lr: float = 0.0,
    **update: Any,
) -> Learner:
    policy = model(device, dtype)
    if recomputes:
        recompute_layers(policy)
    update = {"lr": 1e-3, "critic_lr": 1e-3} | update
    return Learner(
        Models(policy, critic=True, reference=True),
        UpdateConfig(**update),
        LossConfig(**PLAIN),
        longest=20,
        muon_lr=muon_lr,
    )


def prompts() -> list[Prompt]:
    """Prompts of different lengths: two are equal, and all begin alike."""
    starts = [(3, 4, 5, 6), (3, 4, 5, 6), (3, 4, 9), tuple(range(3, 20))]
    return [Prompt((), ids, 0, TOKENS, 1.0, seed) for seed, ids in enumerate(starts)]


def sampled(policy: Any, **how: Any) -> list[Completion]:
    sampler = Sampler(policy, ends(2), slots=3, max_length=64, **how)

    async def everyone() -> list[Completion]:
        return list(await asyncio.gather(*[sampler.complete(prompt) for prompt in prompts()]))

    return asyncio.run(everyone())


@DEVICES
def test_packed_rows_are_computed_in_bfloat16(device: str) -> None:
    """A GPU's kernel for sequences of various lengths gives the states of the padded rows."""
    assert packed.longest(model(device, torch.bfloat16).get_decoder()) > 0


@KINDS
def test_scores_equal_those_of_the_cpu(device: str, dtype: torch.dtype, atol: float) -> None:
    on_cpu, on_device = learner("cpu", torch.float32), learner(device, dtype)
    part = batch(on_cpu)
    for name in ("logprobs", "values"):
        actual, expected = getattr(on_device, name)(part), getattr(on_cpu, name)(part)
        for a, b in zip(
            *((x if isinstance(x, tuple) else (x,)) for x in (actual, expected)), strict=True
        ):
            assert a.device.type == "cpu" and a.dtype == torch.float32
            torch.testing.assert_close(a, b, atol=atol, rtol=0)
    prompt, thought = [3, 4, 5], [[6, 7], [8]]
    torch.testing.assert_close(
        on_device.cross_scores([prompt], thought),
        on_cpu.cross_scores([prompt], thought),
        atol=2 * atol,
        rtol=0,
    )


@pytest.mark.parametrize(
    ("device", "dtype", "atol", "muon_lr", "recomputes"),
    [
        ("cpu", *BFLOAT16, 1e-3, True),
        pytest.param("cuda", *FLOAT32, 0.0, False, marks=CUDA.marks),
        pytest.param("cuda", *BFLOAT16, 0.0, False, marks=CUDA.marks),
        pytest.param("cuda", *BFLOAT16, 1e-3, True, marks=CUDA.marks),
    ],
)
def test_updates_equal_those_of_the_cpu(
    device: str, dtype: torch.dtype, atol: float, muon_lr: float, recomputes: bool
) -> None:
    on_cpu = learner("cpu", torch.float32, muon_lr=muon_lr)
    on_device = learner(device, dtype, recomputes, muon_lr=muon_lr, microbatch_tokens=20)
    part = batch(on_cpu)
    part = replace(part, values_BT=on_cpu.values(part))
    for step in range(2):
        ours, theirs = on_cpu.update(part, step), on_device.update(part, step)
        for name in ("loss/policy", "loss/value", "gradient/policy_norm", "gradient/critic_norm"):
            assert theirs[name].value == pytest.approx(ours[name].value, abs=atol, rel=3 * atol)
    ours, theirs = (
        torch.cat([each.detach().cpu().flatten() for each in one.masters.trained.values()])
        for one in (on_cpu, on_device)
    )
    start = torch.cat(
        [each.detach().flatten() for each in model("cpu", torch.float32).parameters()]
    )
    # AdamW's first steps have equal lengths; if a gradient is almost 0, rounding flips the sign.
    assert float((theirs - ours).norm() / (ours - start).norm()) < 20 * atol
    norms = on_device.gradient_norms(part, torch.tensor([0, 0, 1, 1]))
    assert all(metric.value >= 0 for metric in norms.values())


@pytest.mark.parametrize(
    ("device", "dtype", "bound"),
    [
        pytest.param("cpu", "bfloat16", 2e-2, marks=pytest.mark.slow),
        pytest.param("cuda", "float32", 1e-5, marks=CUDA.marks),
        pytest.param("cuda", "bfloat16", 2e-2, marks=CUDA.marks),
    ],
)
def test_gradients_of_recorded_episodes_equal_those_of_the_cpu(
    device: str, dtype: str, bound: float
) -> None:
    """Each difference is a share of the largest gradient; a bfloat16 sum has 8 bits."""
    exact, on_cpu, on_device = (
        gradients_of(config_of("grpo", model__dtype=kind), where)
        for kind, where in (("float32", "cpu"), (dtype, "cpu"), (dtype, device))
    )
    found = relative(on_device, exact)
    print(f"{dtype}: {found:.2e} from float32, {relative(on_device, on_cpu):.2e} from the CPU's")  # noqa: T201
    assert found < bound


def gradients_of(config: Config, device: str) -> list[Tensor]:
    """The gradients of the first update on the recorded episodes."""
    policy, _ = load_policy(bandit_model(), device, config.model.dtype)
    one = Learner(Models(policy, reference=True), config.update, config.loss)
    part = batch_for(one, config)
    with gradients() as found:
        one.update(part, 0)
    return [each.cpu() for each in found[0]]


@KINDS
def test_logprobs_of_sampler_and_learner_agree(
    device: str, dtype: torch.dtype, atol: float
) -> None:
    one = learner(device, dtype)
    completions = sampled(one.model)
    rows = []
    for number, (prompt, completion) in enumerate(zip(prompts(), completions, strict=True)):
        ids, logprobs = completion.token_ids, completion.logprobs
        assert ids is not None and logprobs is not None and prompt.token_ids is not None
        num_before, num = len(prompt.token_ids), len(ids)
        mask = (False,) * num_before + (True,) * num
        ends = (False,) * (num_before + num - 1) + (True,)
        turns = (-1,) * num_before + (0,) * num
        padded = (0.0,) * num_before + logprobs
        rows.append(Sample(prompt.token_ids + ids, mask, padded, turns, ends, number, 0))
    part = collate(rows)
    actual = one.logprobs(part)[0]
    torch.testing.assert_close(actual, part.sampled_logprobs_BT, atol=atol, rtol=0)


@DEVICES
def test_sampling_equals_that_of_the_cpu(device: str) -> None:
    """Equal uniforms and almost equal distributions give equal tokens, except in rare cases."""
    on_cpu, on_device = sampled(model("cpu", torch.float32)), sampled(model(device, torch.float32))
    assert [each.token_ids for each in on_cpu] == [each.token_ids for each in on_device]


@DEVICES
@pytest.mark.parametrize("name", ["Qwen2", "Qwen3Moe"])
def test_graphs_sample_the_same_tokens(name: str, device: str) -> None:
    """A mixture of experts may be one that cannot be recorded."""
    policy = model(device, torch.float32) if name == "Qwen2" else build(name).to(device)
    with_graphs, without = sampled(policy), sampled(policy, graphs=False)
    assert [each.token_ids for each in with_graphs] == [each.token_ids for each in without]
    for ours, theirs in zip(with_graphs, without, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=LOGPROB)


@DEVICES
def test_an_update_waits_for_the_gpu_once(device: str) -> None:
    """As `tests/networks/test_waits.py` counts on a device without numbers."""
    one = learner(device, torch.bfloat16, microbatch_tokens=20)
    part = batch(one)
    one.update(part, 0)
    with waits() as found:
        one.update(part, 1)
    assert len(found) == (device == "cuda")


@pytest.mark.parametrize("device", [CUDA])
def test_a_run_trains_and_resumes(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    config = merge(
        "bandit",
        settings(
            algorithm="starpo/ppo",
            model__dtype="bfloat16",
            model__gradient_checkpointing=True,
            steps=2,
            rollout__num_groups=1,
            eval__episodes=1,
        ),
    )
    train(config, tmp_path / "run")
    run = tmp_path / "run"
    assert newest(run).name == "step-2"
    (newest(run) / "state.json").unlink()
    assert resume(run).after is not None
    metrics = read_metrics(run)
    assert all(value < 0.1 for value in metrics["mismatch/kl"].values())
    assert not any(metrics["update/skipped_policy"].values())


# Without a GPU.


def test_decoding_never_waits_for_the_device() -> None:
    """No boolean index or number needs the device; all indices are on the device of the keys."""
    decoder = make_decoder(model("meta", torch.bfloat16), 4, 32)
    assert isinstance(decoder, HFDecoder), "the fast decoder is for CPUs"
    logits = decoder.prefill([0, 2], [0, 0], [[1, 2, 3], [4, 5]])
    assert logits.shape[0] == 2 and logits.dtype == torch.float32
    decoder.copy(0, 1, 3)
    slots = torch.tensor([0, 1, 2])
    for at in range(2):
        starts = torch.tensor([3, 3, 2]) + at
        assert decoder.decode(slots, starts, torch.tensor([6, 7, 8])).shape[0] == 3


def test_only_the_padded_path_reports_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    one = learner("cpu", torch.float32)
    assert "update/padding_fraction" not in one.update(batch(one), 0)
    monkeypatch.setattr("ragen.networks.model.is_fast", lambda _: False)
    monkeypatch.setattr("ragen.networks.packed.longest", lambda _: 0)
    one = learner("cpu", torch.float32)
    part = batch(one)
    wide = part.num_rows * int(part.lengths_B.max())
    fraction = one.update(part, 0)["update/padding_fraction"].value
    assert fraction == pytest.approx(1 - int(part.lengths_B.sum()) / wide)


def test_a_copied_model_keeps_its_own_gradients() -> None:
    """A deep copy of a learner's model has no masters that take its gradients."""
    one = learner("cpu", torch.bfloat16)
    alone = copy.deepcopy(one.model)
    weight: Tensor = alone.get_input_embeddings().weight
    weight.float().sum().backward()
    assert weight.grad is not None
    assert all(master.grad is None for master in one.masters.trained.values())
