"""Models from folders and from the Hub, and those that are refused in one line."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2Model,
)

from ragen.core.errors import RagenError
from ragen.models.hub import model_folder, read_sizes
from ragen.models.loading import load_policy, load_tokenizer, save_model
from ragen.models.names import is_available_offline
from ragen.models.pretrained import model_config
from ragen.sampling.local_sampler import Sampler
from tests.models.test_hostile_files import set_field
from tests.tiny import ends, tiny_model, tiny_tokenizer

WORDS = tiny_tokenizer("chatml")


def refusal(path: str | Path, **options: Any) -> str:
    with pytest.raises(RagenError) as caught:
        load_policy(path, "cpu", "float32", **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def save_with_config(folder: Path, **values: Any) -> Path:
    """A saved model whose config.json has other values."""
    save_model(tiny_model(WORDS), WORDS, folder)
    set_field(folder, "config.json", **values)
    return folder


def test_shards_are_loaded_and_a_missing_one_is_named(tmp_path: Path) -> None:
    model = tiny_model(WORDS)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    WORDS.save_pretrained(tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3 and not (tmp_path / "model.safetensors").exists()
    loaded, _ = load_policy(tmp_path, "cpu", "float32")
    probe = torch.arange(6)[None]
    assert torch.equal(loaded(probe).logits, model(probe).logits)
    shards[1].unlink()
    text = refusal(tmp_path)
    assert f"{shards[1].name} is missing (1 of {len(shards)} shards)" in text


def test_a_git_lfs_pointer_instead_of_weights_is_refused(tmp_path: Path) -> None:
    save_model(tiny_model(WORDS), WORDS, tmp_path)
    note = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 988097824\n"
    (tmp_path / "model.safetensors").write_text(note)
    text = refusal(tmp_path)
    assert "model.safetensors is a note of git-lfs; run `git lfs pull`" in text


def test_only_causal_language_models_are_loaded(tmp_path: Path) -> None:
    size = {"vocab_size": len(WORDS), "hidden_size": 16, "num_attention_heads": 2}
    bert = BertConfig(**size, intermediate_size=16, num_hidden_layers=1, initializer_range=0.4)
    heads = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    bart = BartConfig(vocab_size=len(WORDS), d_model=16, **layers, **heads)
    qwen = tiny_model(WORDS, tie_word_embeddings=False).config
    torch.manual_seed(0)
    others: dict[str, tuple[Any, str]] = {
        "an encoder": (BertModel(bert), "not those of a causal language model: cls."),
        "an encoder with a head": (
            BertForMaskedLM(bert),
            "is not causal: its logits for a token depend on later tokens",
        ),
        "an encoder and a decoder": (
            BartForConditionalGeneration(bart),
            "(bart) is no causal language model",
        ),
        "no output layer": (Qwen2Model(qwen), "lm_head.weight is missing"),
        "a classifier": (Qwen2ForSequenceClassification(qwen), "lm_head.weight is missing"),
    }
    for name, (model, reason) in others.items():
        save_model(model, WORDS, tmp_path / name)
        assert reason in refusal(tmp_path / name)


def test_an_architecture_that_does_not_take_the_masks_of_the_sampler_is_refused(
    tmp_path: Path,
) -> None:
    config = BloomConfig(vocab_size=len(WORDS), hidden_size=16, n_layer=1, n_head=4)
    save_model(BloomForCausalLM(config).eval(), WORDS, tmp_path)
    assert "does not take the masks of the sampler" in refusal(tmp_path)


def test_a_generation_config_with_a_temperature_that_is_not_used_is_no_obstacle(
    tmp_path: Path,
) -> None:
    save_model(tiny_model(WORDS), WORDS, tmp_path / "model")
    values = {"temperature": 0.6, "top_p": 0.9, "do_sample": False}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(values))
    model, tokenizer = load_policy(tmp_path / "model", "cpu", "float32")
    save_model(model, tokenizer, tmp_path / "again")
    assert load_policy(tmp_path / "again", "cpu", "float32")


def test_sampler_refuses_a_model_without_a_cache_of_keys() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(RagenError, match="of the type mamba have no cache of keys"):
        Sampler(model, ends(0))


def test_a_config_that_does_not_fit_the_weights_is_refused(tmp_path: Path) -> None:
    wrong = save_with_config(tmp_path / "wrong", intermediate_size=48)
    assert "do not fit its config.json: model.layers.0.mlp" in refusal(wrong)
    assert "hidden_size" in refusal(save_with_config(tmp_path / "text", hidden_size="wide"))
    quantised = save_with_config(
        tmp_path / "q", quantization_config={"quant_method": "gptq", "bits": 4}
    )
    assert "are quantised" in refusal(quantised)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_saved_config_ties_the_output_layer_as_its_weights_do(
    tmp_path: Path, is_own: bool
) -> None:
    """Programs that go by the config would leave out a layer that the files hold."""
    folder = save_with_config(tmp_path / "given", tie_word_embeddings=True)
    held = load_file(folder / "model.safetensors")
    embedding = held["model.embed_tokens.weight"]
    held["lm_head.weight"] = torch.randn_like(embedding) if is_own else embedding.clone()
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    model, tokenizer = load_policy(folder, "cpu", "bfloat16")
    assert model.config.tie_word_embeddings is not is_own
    save_model(model, tokenizer, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text("utf-8"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert config["tie_word_embeddings"] is not is_own and ("lm_head.weight" in saved) == is_own
    assert config["dtype"] == "bfloat16" and saved["model.embed_tokens.weight"].dtype.itemsize == 2
    assert config["vocab_size"] == len(saved["model.embed_tokens.weight"])
    if is_own:
        assert torch.equal(saved["lm_head.weight"], held["lm_head.weight"].bfloat16())
    again, _ = load_policy(tmp_path / "saved", "cpu", "bfloat16")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_weights_that_the_layers_of_the_config_leave_unused_are_refused(tmp_path: Path) -> None:
    fewer = {"num_hidden_layers": 1, "layer_types": None}
    unused = save_with_config(tmp_path / "fewer", **fewer)
    assert "describes no model.layers.1." in refusal(unused)
    other = save_with_config(tmp_path / "other", model_type="llama")  # without Qwen's biases
    assert "describes no model.layers.0.self_attn.k_proj.bias" in refusal(other)
    predicting = save_with_config(tmp_path / "mtp", num_nextn_predict_layers=1, **fewer)
    assert load_policy(predicting, "cpu", "float32")
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=2, n_head=2))
    save_model(gpt2.transformer, WORDS, tmp_path / "gpt2")  # names without a prefix
    assert load_policy(tmp_path / "gpt2", "cpu", "float32")
    set_field(tmp_path / "gpt2", "config.json", n_layer=1)
    assert "describes no h.1." in refusal(tmp_path / "gpt2")


def test_a_tokenizer_that_drops_merges_at_random_encodes_exactly(tmp_path: Path) -> None:
    save_model(tiny_model(WORDS), WORDS, tmp_path)
    words = json.loads((tmp_path / "tokenizer.json").read_text())
    set_field(tmp_path, "tokenizer.json", model=words["model"] | {"dropout": 0.9})
    text = "Go up or down, and so on. " * 9
    _, tokenizer = load_policy(tmp_path, "cpu", "float32")
    expected = WORDS.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False) == expected


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(tmp_path: Path) -> None:
    save_model(tiny_model(WORDS, vocab_size=len(WORDS) - 3), WORDS, tmp_path)
    largest, rows = len(WORDS) - 1, len(WORDS) - 3
    assert f"has the id {largest}, but the embedding has {rows} rows" in refusal(tmp_path)


def test_a_tokenizer_that_names_another_class_is_read_from_its_own_file(tmp_path: Path) -> None:
    """transformers before 5.24 builds a Llama tokenizer from the vocabulary alone."""
    WORDS.save_pretrained(tmp_path)
    set_field(tmp_path, "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    text = "Go up, P _ G\n"
    loaded = load_tokenizer(tmp_path, "a model")
    expected = WORDS.encode(text, add_special_tokens=False)
    assert loaded.encode(text, add_special_tokens=False) == expected
    assert loaded.eos_token_id == WORDS.eos_token_id


def test_a_max_length_beyond_the_positions_of_the_model_is_refused(tmp_path: Path) -> None:
    save_model(tiny_model(WORDS, max_position_embeddings=64), WORDS, tmp_path)
    assert load_policy(tmp_path, "cpu", "float32", max_length=64)
    text = refusal(tmp_path, max_length=65)
    assert "model.max_length = 65" in text and "set model.max_length to 64 or less" in text


# The Hub, simulated by a server on loopback.

SHA = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """One model, ``me/tiny``, read from `folder`; ``me/gated`` and all others are refused."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        info, tree = "/api/models/me/tiny", f"/api/models/me/tiny/tree/{SHA}"
        file = self.folder / path.rpartition("/")[2]
        if path in ("/", ""):
            self.answer(200, b"")
        elif "me/gated" in path:
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path in (info, f"{info}/revision/main"):
            self.answer(200, json.dumps({"id": "me/tiny", "sha": SHA}).encode())
        elif path == tree:
            files = [
                {"type": "file", "path": each.name, "oid": "a" * 40, "size": 1}
                for each in self.folder.iterdir()
            ]
            self.answer(200, json.dumps(files).encode())
        elif path.startswith("/me/tiny/resolve/") and file.is_file():
            self.answer(200, file.read_bytes(), {"ETag": f'"{file.name}"', "X-Repo-Commit": SHA})
        else:
            self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing, because tests read standard error."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A Hub with one model, and an empty cache; returns a function that closes the Hub."""
    folder = tmp_path / "on the hub"
    save_model(tiny_model(WORDS), WORDS, folder)
    monkeypatch.setattr(Hub, "folder", folder, raising=False)
    monkeypatch.setattr(Hub, "asked", [], raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def close() -> None:
        server.shutdown()
        server.server_close()

    here = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", here)
    template = here + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield close
    close()


def test_a_model_from_the_hub_is_cached_for_use_without_a_network(hub: Callable[[], None]) -> None:
    assert not is_available_offline("me/tiny")
    words = model_folder("me/tiny", weights=False)
    assert (
        is_available_offline("me/tiny")
        and is_available_offline(words)
        and not is_available_offline("no/such/model")
    )
    assert (words / "config.json").is_file() and not (words / "model.safetensors").exists()
    assert model_config(words, "me/tiny").model_type == "qwen2"
    assert read_sizes("me/tiny") == read_sizes(str(Hub.folder))
    assert not (words / "model.safetensors").exists(), "sizes need the headers only"
    index = {"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (words / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(Hub.folder / "model.safetensors", words / "a.safetensors")
    assert read_sizes("me/tiny") == read_sizes(str(Hub.folder)), "a download that was interrupted"
    (words / "model.safetensors.index.json").unlink()
    (words / "a.safetensors").unlink()
    loaded, _ = load_policy("me/tiny", "cpu", "float32")
    probe = torch.arange(6)[None]
    assert torch.equal(loaded(probe).logits, tiny_model(WORDS)(probe).logits)
    hub()
    again, _ = load_policy("me/tiny", "cpu", "float32")
    assert torch.equal(loaded(probe).logits, again(probe).logits)


def test_sizes_of_a_model_on_the_hub_need_safetensors_and_a_network(
    hub: Callable[[], None],
) -> None:
    model_folder("me/tiny", weights=False)
    (Hub.folder / "model.safetensors").unlink()
    with pytest.raises(RagenError, match="no weights as safetensors on the Hub"):
        read_sizes("me/tiny")
    hub()
    with pytest.raises(RagenError, match="or the network fails"):
        read_sizes("me/tiny")


def test_gated_missing_and_unreachable_models_are_refused(hub: Callable[[], None]) -> None:
    assert "is gated: accept its terms" in refusal("me/gated")
    for name in ("me/none", "me/a/b"):
        assert f"there is no model '{name}' that may be read from here" in refusal(name)
    hub()
    assert "is not in the local cache (not all of it), and the Hub did not" in refusal("me/tiny")
