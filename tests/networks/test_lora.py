"""LoRA: the function and the gradient of each role, and the folder of a saved adapter."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ragen.config.sections import LossConfig, UpdateConfig
from ragen.core.errors import RagenError
from ragen.core.types import Role
from ragen.learning.learner import Learner
from ragen.learning.models import Models
from ragen.models.adapter_folder import (
    ADAPTER_WEIGHTS,
    fingerprint_of_base,
    load_adapter,
    put_on,
    save_adapter,
)
from ragen.models.loading import recompute_layers
from ragen.models.names import ADAPTER_CONFIG, BASE, base_of
from ragen.networks import fast_qwen2, lora, model, sizes
from ragen.networks.lora import acting, adapter_of, attach
from ragen.networks.model import hidden_states
from tests.learning.test_learner import batch, close, equal, gradient, weights
from tests.networks.test_model import ragged, tiny
from tests.tiny import merged, tiny_model, tiny_tokenizer
from tests.tolerance import GRADIENT, assert_close

BOTH: tuple[Role, Role] = ("policy", "critic")
QWEN = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
SHAPE: dict[str, Any] = {"rank": 3, "alpha": 6, "targets": "all-linear", "seed": 0, "base": "here"}


def adapted(
    plain: Any, roles: tuple[Role, ...] = BOTH, random_weights: bool = True, **shape: Any
) -> Any:
    """The base with adapters, by default with random weights that differ between roles."""
    attach(plain, roles, **(SHAPE | shape))
    generator = torch.Generator().manual_seed(7)
    for role in roles if random_weights else ():
        for weight in adapter_of(plain, role).parameters():
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return plain


def learner(critic: bool = True, weight_decay: float = 0.01, **update: Any) -> Learner:
    roles: tuple[Role, ...] = BOTH if critic else ("policy",)
    policy = adapted(tiny_model(tiny_tokenizer()), roles, rank=4)
    return Learner(
        Models(policy, critic, reference=True),
        UpdateConfig(**({"lr": 1e-2, "critic_lr": 1e-2} | update)),
        LossConfig(entropy=0.0, kl=0.0),
        steps=10,
        longest=20,
        weight_decay=weight_decay,
    )


def logits(one: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = one(torch.arange(1, 9)[None]).logits
    return found


# Functions of the roles.


def test_adapter_golden() -> None:
    """y = W x + (α / r) B A x with W the identity, A = (1 0; 0 1), B = (0 1; 2 0), α / r = 3."""
    one = tiny(hidden_size=2, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)
    attach(one, ("policy",), **SHAPE | {"rank": 2, "targets": "o_proj"})
    layer = one.model.layers[0].self_attn.o_proj
    with torch.no_grad():
        layer.base_layer.weight.copy_(torch.eye(2))
        layer.lora_A["policy"].weight.copy_(torch.eye(2))
        layer.lora_B["policy"].weight.copy_(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
    # x = (1, 10): A x = x, B A x = (10, 2), three times that is (30, 6); W x = (1, 10).
    x = torch.tensor([1.0, 10.0])
    assert layer(x).tolist() == [31.0, 16.0]
    assert (fast_qwen2.effective_weight(layer) @ x).tolist() == [31.0, 16.0]
    with acting(one, "reference"):
        assert layer(x).tolist() == (fast_qwen2.effective_weight(layer) @ x).tolist() == [1.0, 10.0]


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_roles_start_equal_to_the_base_then_differ(kind: str) -> None:
    plain = tiny(kind)
    expected = logits(plain)
    one = adapted(plain, random_weights=False)
    for role in (*BOTH, "reference"):
        with acting(one, role):
            assert torch.equal(logits(one), expected)
    one = adapted(tiny(kind))
    policy = logits(one)
    with acting(one, "critic"):
        critic = logits(one)
        with pytest.raises(ZeroDivisionError), acting(one, "reference"):
            assert torch.equal(logits(one), expected)
            raise ZeroDivisionError
    assert not torch.allclose(policy, expected) and not torch.allclose(policy, critic)
    assert torch.equal(logits(one), policy), "outside of a role it is the policy"


def test_initial_adapters_depend_only_on_seed_and_role() -> None:
    def drawn(seed: int, ambient: int = 0) -> list[Tensor]:
        plain = tiny(num_hidden_layers=1)
        torch.manual_seed(ambient)
        before = torch.get_rng_state()
        one = adapted(plain, random_weights=False, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        adapters = (adapter_of(one, role).parameters() for role in BOTH)
        return [torch.cat([weight.detach().flatten() for weight in each]) for each in adapters]

    (policy, critic), same, other = drawn(0), drawn(0, ambient=5), drawn(1)
    assert torch.equal(policy, same[0])
    assert not torch.equal(policy, other[0]) and not torch.equal(policy, critic)


def targets_of(model: PreTrainedModel, rank: int = 2) -> list[str]:
    layers = lora.linear_layers(model)
    return sizes.adapted({k: tuple(v.weight.shape) for k, v in layers.items()}, "all-linear", rank)


def test_ranks_and_layers_that_the_model_does_not_have_are_refused() -> None:
    base = tiny()
    highest = max(min(each.weight.shape) for each in lora.linear_layers(base).values())
    assert targets_of(base, highest) == QWEN
    with pytest.raises(RagenError, match=f"no layer of the model has a rank above {highest}"):
        targets_of(base, highest + 1)
    for name in ("lm_head", "query"):
        with pytest.raises(RagenError, match=f"'{name}'.* choose from down_proj, gate_proj, k_p"):
            attach(base, ("policy",), **SHAPE | {"targets": f"q_proj,{name}"})


def test_all_linear_targets_every_linear_layer_except_the_output_layer() -> None:
    for tied in (True, False):
        base = tiny(tie_word_embeddings=tied)
        assert targets_of(base) == QWEN
        one = adapted(base)
        assert targets_of(one) == QWEN
        assert type(one.lm_head) is torch.nn.Linear
        assert (one.lm_head.weight is one.model.embed_tokens.weight) == tied
    some = adapted(tiny(), targets="q_proj, v_proj")
    assert {
        name.split("/")[-1].split(".")[0] for name in adapter_of(some, "policy").state_dict()
    } == {
        "q_proj",
        "v_proj",
    }


def test_adapted_layers_compute_bit_for_bit_what_peft_does() -> None:
    """On a base in bfloat16, too, where the adapters are float32."""
    results = []
    for ours in (True, False):
        policy = adapted(tiny("llama").to(torch.bfloat16))
        layers = [each for each in policy.modules() if hasattr(each, "lora_A")]
        for layer in () if ours else layers:
            del layer.forward  # the instance's, which hides peft's
        states_ND = hidden_states(policy, *ragged())
        states_ND.float().square().sum().backward()
        gradients = [weight.grad for weight in adapter_of(policy, "policy").parameters()]
        with acting(policy, "reference"):
            results.append([states_ND, hidden_states(policy, *ragged()), *gradients])
    assert len(results[0]) > 10
    assert all(map(torch.equal, *results))


# The fast path.


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,down_proj"])
def test_fast_path_equals_the_general_path(targets: str) -> None:
    one = adapted(tiny(num_hidden_layers=2), targets=targets)
    assert fast_qwen2.supports(one)
    for role in (*BOTH, "reference"):
        with acting(one, role):
            results = []
            for path in (model.padded_hidden_states, fast_qwen2.hidden_states):
                one.zero_grad()
                states = path(one, *ragged())
                if role != "reference":
                    states.square().sum().backward()
                results.append((states.detach(), grads(one)))
            assert_close(results[1][0], results[0][0])
            assert results[0][1].keys() == results[1][1].keys()
            assert all(f".{role}." in name for name in results[0][1])
            if role != "reference":
                assert_close(results[1][1], results[0][1], GRADIENT)


def grads(one: Any) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None}


# Gradients.


def parts(one: Learner) -> dict[str, dict[str, Tensor]]:
    """Weights by owner: the adapter of each role, the head of the critic, the base."""
    owners: dict[str, dict[str, Tensor]] = {"policy": {}, "critic": {}, "head": {}, "base": {}}
    for name, weight in weights(one).items():
        owner, _, rest = name.partition(".")
        adapter = next((role for role in BOTH if f".{role}.weight" in rest), "base")
        if owner == "policy":
            owners[adapter][rest] = weight
        elif rest.startswith("head"):
            owners["head"][rest] = weight
    return owners


def changed_parts(one: Learner, before: dict[str, dict[str, Tensor]]) -> set[str]:
    return {name for name, part in parts(one).items() if not equal(part, before[name])}


def test_an_update_changes_each_role_by_its_own_loss() -> None:
    one = learner(weight_decay=0.0)
    assert one.critic is not None
    assert one.reference is one.model, "no second copy of the base"
    torch.nn.init.normal_(one.critic.head.weight, generator=torch.Generator().manual_seed(0))
    part = batch(one)
    reference = one.logprobs(part, reference=True)[0]

    start, logprobs, values = parts(one), one.logprobs(part)[0], one.values(part)
    policy_optimizers = list(one.optimizers)
    one.optimizers.clear()  # only the critic learns
    one.update(part, 0)
    assert changed_parts(one, start) == {"critic", "head"}
    assert torch.equal(one.logprobs(part)[0], logprobs) and not torch.equal(
        one.values(part), values
    )

    start, values = parts(one), one.values(part)
    one.optimizers.extend(policy_optimizers)
    one.critic_optimizers.clear()  # only the policy learns from here on
    one.update(part, 1)
    assert changed_parts(one, start) == {"policy"}
    assert torch.equal(one.values(part), values) and not torch.equal(
        one.logprobs(part)[0], logprobs
    )
    assert torch.equal(one.logprobs(part, reference=True)[0], reference)
    assert all(p.requires_grad == ("lora_" in name) for name, p in one.model.named_parameters())


def test_gradients_do_not_depend_on_microbatches_and_checkpointing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checkpointing recomputes activations in the backward pass, in the role of the forward."""
    monkeypatch.setattr(fast_qwen2, "supports", lambda _: False)
    gradients: list[dict[str, Tensor]] = []
    for tokens, checkpointing in ((10_000, False), (20, True)):
        policy = adapted(tiny_model(tiny_tokenizer()), rank=4)
        if checkpointing:
            recompute_layers(policy)
        one = Learner(
            Models(policy, critic=True),
            UpdateConfig(microbatch_tokens=tokens),
            LossConfig(entropy=0.01, kl=0.0),
            longest=20,
        )
        assert one.critic is not None
        torch.nn.init.normal_(one.critic.head.weight, generator=torch.Generator().manual_seed(0))
        gradients.append(gradient(one, batch(one), monkeypatch))
    for each in gradients[1:]:
        close(each, gradients[0])
    for role in BOTH:
        assert any(bool(grad.any()) for name, grad in gradients[0].items() if f".{role}." in name)
    assert all("lora_" in name for name in gradients[0])


# Folders.


@pytest.fixture
def base(tmp_path: Path, originals: tuple[Path, Any]) -> Path:
    return shutil.copytree(originals[0] / "base", tmp_path / "base")


def loaded(folder: Path) -> Any:
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a base and an adapter, which tests copy, and the model of both."""
    folder = tmp_path_factory.mktemp("originals")
    tiny_model(tiny_tokenizer()).save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    one = adapted(loaded(folder / "base"), base=str(folder / "base"))
    save_adapter(one, folder / "adapter", fingerprint_of_base(one))
    return folder, one


@pytest.fixture
def saved(base: Path, tmp_path: Path, originals: tuple[Path, Any]) -> tuple[Path, Any]:
    folder = shutil.copytree(originals[0] / "adapter", tmp_path / "adapter")
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    config["base_model_name_or_path"] = str(base)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    return folder, originals[1]


def test_a_saved_folder_is_read_by_peft_and_transformers(
    saved: tuple[Path, Any], base: Path
) -> None:
    folder, one = saved
    assert {path.name for path in folder.iterdir()} == {ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE}
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 6, QWEN)
    from packaging.version import Version
    from peft import PeftModel, __version__
    from transformers import AutoModelForCausalLM
    from transformers.integrations.peft import MIN_PEFT_VERSION

    if Version(__version__) < Version(MIN_PEFT_VERSION):  # transformers 5.24 and peft 0.21
        pytest.skip(f"this transformers itself reads adapters from peft {MIN_PEFT_VERSION} on")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for plain in (
            PeftModel.from_pretrained(loaded(base), str(folder)),
            AutoModelForCausalLM.from_pretrained(folder),
        ):
            assert_close(logits(plain.eval()), logits(one))


def test_a_saved_adapter_is_loaded_unchanged(saved: tuple[Path, Any], base: Path) -> None:
    folder, one = saved
    again = loaded(base_of(folder))
    put_on(again, folder)
    assert torch.equal(logits(again), logits(one))
    other = adapted(loaded(base), seed=3)
    load_adapter(other, folder)
    assert torch.equal(logits(other), logits(one))


def test_merged_is_a_plain_model(tmp_path: Path) -> None:
    one = adapted(tiny("gpt2"))
    plain, expected = merged(one), logits(one)
    assert not lora.has_adapters(plain) and lora.has_adapters(one)
    assert plain.state_dict().keys() == tiny("gpt2").state_dict().keys()
    assert_close(logits(plain), expected)
    assert all(p.requires_grad for p in plain.parameters())
    plain.save_pretrained(tmp_path)
    assert torch.equal(logits(type(plain).from_pretrained(tmp_path).eval()), logits(plain))


def test_fingerprint_of_base_ignores_dtype_and_adapters(base: Path) -> None:
    one = loaded(base)
    fingerprint = fingerprint_of_base(one)
    assert fingerprint_of_base(adapted(loaded(base))) == fingerprint
    assert fingerprint_of_base(one.to(torch.bfloat16)) == fingerprint
    one.model.norm.weight.data[0] *= 1.01
    assert fingerprint_of_base(one) != fingerprint


def message(work: Any, *args: Any) -> str:
    with pytest.raises(RagenError) as caught:
        work(*args)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_adapters_that_do_not_fit_are_refused_in_one_line(
    saved: tuple[Path, Any], base: Path
) -> None:
    folder, _ = saved
    other = loaded(base)
    other.model.norm.weight.data[0] += 1
    assert "another base" in message(put_on, other, folder)
    wide = tiny_model(tiny_tokenizer(), hidden_size=64)
    assert "another" in message(put_on, wide, folder)
    deep = adapted(tiny_model(tiny_tokenizer()), rank=2)
    assert "is [3, 64] in it and [2, 64] here" in message(load_adapter, deep, folder)

    broken = adapted(loaded(base))
    next(adapter_of(broken, "policy").parameters()).data[0, 0] = torch.nan
    save_adapter(broken, folder)
    assert "holds NaN or infinity" in message(put_on, loaded(base), folder)
    (folder / ADAPTER_WEIGHTS).write_bytes(b"nothing")
    assert f"cannot read {folder / ADAPTER_WEIGHTS}" in message(put_on, loaded(base), folder)
    (folder / ADAPTER_CONFIG).write_text("{")
    assert f"cannot read {folder / ADAPTER_CONFIG}" in message(put_on, loaded(base), folder)


def test_extensions_of_lora_are_refused_and_dropout_is_ignored(
    saved: tuple[Path, Any], base: Path
) -> None:
    folder, one = saved
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | {"lora_dropout": 0.5}))
    again = loaded(base)
    put_on(again, folder)
    assert torch.equal(logits(again.train()), logits(one))
    again = loaded(base)
    for more in (
        *({"use_dora": True}, {"bias": "all"}, {"peft_type": "IA3"}, {"lora_bias": True}),
        *({"modules_to_save": ["lm_head"]}, {"alora_invocation_tokens": [7]}),
    ):
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config | more))
        assert "not plain LoRA" in message(put_on, again, folder)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_the_embedding_or_the_output_layer_is_refused(
    base: Path, tmp_path: Path, target: str
) -> None:
    """Such an adapter would be ignored silently, because these layers are read as matrices."""
    from peft import LoraConfig, get_peft_model

    lora_config = LoraConfig(r=4, target_modules=["q_proj", target], task_type="CAUSAL_LM")
    with warnings.catch_warnings(action="ignore"):  # of tied weights
        get_peft_model(loaded(base), lora_config).save_pretrained(
            tmp_path, save_embedding_layers=False
        )
        text = message(put_on, loaded(base), tmp_path)
    assert "the adapter changes" in text and target in text


def test_base_of_finds_a_relinked_or_embedded_base(saved: tuple[Path, Any], base: Path) -> None:
    folder, _ = saved
    base.rename(base.with_name("moved"))
    assert "which is gone: put it back, or set base_model" in message(base_of, folder)
    base.symlink_to(base.with_name("moved"))
    put_on(loaded(base_of(folder)), folder)
    config = json.loads((folder / ADAPTER_CONFIG).read_text())

    def rename(name: str | None) -> None:
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": name}))

    for name, ending in (
        ("/elsewhere/site-packages/ragen/models/bases/bandit", "bases/bandit"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    ):
        rename(name)
        assert base_of(folder).endswith(ending)
    for gone, complaint in ((None, "names no base"), ("../gone", "which is gone: put it back")):
        rename(gone)
        assert complaint in message(base_of, folder)
    rename(os.path.relpath(base, folder))  # relative to the adapter
    assert Path(base_of(folder)).samefile(base)


def test_a_loaded_adapter_keeps_its_shape(saved: tuple[Path, Any], base: Path) -> None:
    folder, one = saved
    again = loaded(base)
    put_on(again, folder)

    def attach_again(**shape: Any) -> None:
        attach(again, BOTH, **(SHAPE | shape))

    for other in ({"rank": 4}, {"alpha": 3}, {"targets": "q_proj"}):
        with pytest.raises(RagenError, match=r"has rank 3 and alpha 6 on 14 layers \(down_proj,ga"):
            attach_again(**other)
    attach_again()
    assert torch.equal(logits(again), logits(one))
    with acting(again, "critic"):
        assert torch.equal(logits(again), logits(loaded(base)))
