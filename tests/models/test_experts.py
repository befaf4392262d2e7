"""Chain of Experts: its equation, its load, and a base of it that is saved, loaded and trained."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ragen import train
from ragen.bases.base import new_model, prepare, save
from ragen.bases.curriculum import FAMILIES
from ragen.bases.tokenizer import build
from ragen.core.errors import RagenError
from ragen.models.experts import LOAD_WEIGHT, ChainOfExperts, load
from ragen.models.loading import load_policy
from ragen.storage.reader import read_metrics
from tests.tolerance import LOGPROB


def test_two_experts_in_two_iterations() -> None:
    """One expert in each, with a score of ¾ = softmax(ln 3, 0)."""
    sizes = {"hidden_size": 2, "intermediate_size": 2, "hidden_act": "relu", "rms_norm_eps": 0.0}
    chain = {"num_experts": 2, "num_experts_per_tok": 2, "iterations": 2}
    block = ChainOfExperts(SimpleNamespace(**sizes, **chain))
    weights: dict[str, list[list[float]]] = {
        "routers.router_0": [[math.log(3), 0], [0, 0]],  # expert 0 on (1, 1)
        "routers.router_1": [[0, 0], [5 * math.log(3), 0]],  # expert 1 on (.2, 1.4)
        "gate_proj": [[1, 0], [0, 1]],
        "up_proj": [[0, 1], [1, 0]],
        "down_proj": [[0, 100], [8, 0]],
    }
    with torch.no_grad():
        for name, rows in weights.items():
            block.get_submodule(name).weight.copy_(torch.tensor(rows))
        # x⁰ = (1, 1), its norm (1, 1): x¹ = x⁰ + ¾ (0, 8 · 1 · 1) = (1, 7)
        # its norm (1, 7) / √((1 + 49) / 2) = (.2, 1.4): x² = x¹ + ¾ (100 · 1.4 · .2, 0) = (22, 7)
        added = block(torch.tensor([[1.0, 1.0]]))
    torch.testing.assert_close(added, torch.tensor([[21.0, 6.0]]))


def test_rounding_does_not_decide_between_experts() -> None:
    """The scores of two experts are within 1e-6 of a tie, on either side."""
    model = new_model(build(["a"]), 1, 0, experts=2, iterations=4)
    block, x = model.get_decoder().layers[0].mlp, torch.linspace(-1, 1, 128)[None]
    with torch.no_grad():
        for router in block.routers.values():
            router.weight.zero_()
        alike = block(x)
        block.routers.router_0.weight[0] = 1e-6 * x[0] / x.norm()
        assert (block(x) - alike).abs().max() < 1e-4
        block.routers.router_0.weight[0] = x[0]
        assert (block(x) - alike).abs().max() > 1e-3


def test_the_load_is_1_if_experts_are_used_alike_and_is_minimised_beside_the_loss() -> None:
    scores = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
    assert float(load(scores, (scores > 0.5).float())) == 1.0
    alike = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
    assert float(load(alike, (alike > 0.5).float())) == 1.5  # 2 · (1 · .75 + 0 · .25)

    def gradient(weight: float) -> Tensor:
        model = new_model(build(["a"]), 1, 0, experts=4, iterations=2)
        (layer,) = model.get_decoder().layers
        layer.mlp.load_weight = weight
        layer.mlp(torch.linspace(-1, 1, 4 * 128).view(4, 128)).sum().backward()
        found: Tensor = layer.mlp.routers.router_0.weight.grad
        return found

    without = gradient(0.0)
    torch.testing.assert_close(gradient(2.0) - without, 2 * (gradient(1.0) - without))
    assert not torch.equal(gradient(1.0), without)


def test_a_base_with_experts_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    tokenizer, ids = build(["a"]), torch.arange(5)[None]
    model = new_model(tokenizer, 1, 0, experts=8, iterations=2)
    for weight in model.parameters():
        weight.data = weight.data.half().float()  # files of bases have half precision
    save(model, tokenizer, tmp_path / "base")
    loaded, _ = load_policy(tmp_path / "base", "cpu", "float32")
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    weights = [each.get_decoder().layers[0].mlp.load_weight for each in (model, loaded)]
    assert weights == [LOAD_WEIGHT, 0.0]
    with pytest.raises(RagenError, match="iterations are 1, 2 or 4"):
        new_model(tokenizer, 1, 0, experts=8, iterations=3)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "rank"), [("starpo/grpo", 0), ("starpo/ppo", 4)])
def test_a_base_with_experts_is_prepared_and_trained(
    algorithm: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampler and learner compute the same logprobs, up to rounding."""
    few = tuple(replace(stage, episodes=4) for stage in FAMILIES["bandit"])
    monkeypatch.setitem(FAMILIES, "bandit", few)
    prepare("bandit", tmp_path / "base", steps=1, experts=8, iterations=2)
    small = {"rollout.num_groups": 2, "rollout.group_size": 4, "eval.episodes": 4, "steps": 1}
    chosen = {"model.path": str(tmp_path / "base"), "algorithm": algorithm, "lora.rank": rank}
    train("bandit", chosen | small, out=tmp_path / "run")
    assert max(read_metrics(tmp_path / "run")["mismatch/max_abs"].values()) < LOGPROB
