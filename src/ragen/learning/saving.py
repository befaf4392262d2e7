"""A learner's part of a checkpoint: the model, the critic, the optimisers and the masters.

The model, or with LoRA its adapter, is a Hugging Face folder. The tensors of everything else are a
safetensors file for each name (``optimizer-0.safetensors``). If the weights are split over
processes, the first one gathers each file's tensors in main memory and writes them. Every process
reads the files and takes its part, so they load into any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragen.algorithms.batch import Batch, collate
from ragen.chat.chat import Chat
from ragen.core.errors import NotFiniteError, RagenError
from ragen.core.types import Sample
from ragen.learning.learner import Learner
from ragen.learning.optimizers import optimizer_tensors, restore_optimizer, weight_of_state
from ragen.learning.ranks import Ranks
from ragen.models.adapter_folder import load_adapter
from ragen.models.loading import load_policy, save_model
from ragen.networks import lora
from ragen.networks.sharding import fill, gathered, like, local
from ragen.storage.checkpoint import Damaged

QUESTION = "Count from one to ten, then say which of the numbers you like best."

Like = Callable[[str], Tensor | None]
"""From a tensor's name to the weight that it is split like; ``None`` if it is not split."""


def save_learner(
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    chat: Chat,
    max_length: int,
    base: str | None,
) -> None:
    """Write what `load_learner` reads; all processes call it together.

    `base` is the fingerprint of the adapters' base. `max_length` is the longest row in tokens.

    Raises:
        NotFiniteError: The weights do not work.
        OSError: The disk is full or cannot be written.
    """
    ranks = learner.ranks
    ranks.together(lambda: _refuse_not_finite(learner))
    _refuse_broken(learner, chat, max_length)
    split, first = ranks.size > 1, ranks.rank == 0
    tensors = gathered(trained_tensors(learner.model).items(), keep=first) if split else None

    def write_model() -> None:
        if first:
            save_model(learner.model, tokenizer, folder, base, tensors)

    ranks.together(write_model)
    if learner.critic is not None:
        _save(learner.critic.state_dict(), folder, "critic", ranks)
    for name, optimizer in learner.named_optimizers().items():
        _save(optimizer_tensors(optimizer), folder, name, ranks)
    for name, masters in learner.named_masters().items():
        _save(masters.tensors(), folder, name, ranks)


def load_learner(learner: Learner, folder: Path, base: str | None) -> None:
    """Load what `save_learner` wrote, in any number of processes.

    Raises:
        RagenError: The folder's contents are damaged or belong to another run.
    """
    ranks, model = learner.ranks, learner.model
    if lora.has_adapters(model):
        ranks.together(lambda: load_adapter(model, folder, base))
    else:
        saved = ranks.together(lambda: _saved_weights(folder))
        _restore(model.state_dict(), saved, folder)
    if learner.critic is not None:
        own = learner.critic.state_dict()
        _restore(own, _load(folder, "critic", own.get, ranks), folder)
    for name, optimizer in learner.named_optimizers().items():
        weight_of = partial(weight_of_state, optimizer)
        restore_optimizer(optimizer, _load(folder, name, weight_of, ranks))
    for name, masters in learner.named_masters().items():
        masters.restore(_load(folder, name, masters.tensors().get, ranks))


def refuse_another_first(first: str | None, saved: str | None, learner: Learner) -> str | None:
    """The hash of the weights that a run began with, by the checkpoint if it `saved` one.

    `first` is the hash of the weights that are loaded now.

    Raises:
        RagenError: The hashes differ, and the KL reference is a copy of the loaded weights.
    """
    if saved is None or saved == first:
        return first
    if learner.reference is not None:
        raise RagenError(
            "the model that this run began with has changed, so its KL reference is lost; "
            "restore the old weights where model.path points"
        )
    return saved


def _refuse_not_finite(learner: Learner) -> None:
    for name, weights in learner.trained_weights():
        if not bool(local(weights).isfinite().all()):
            raise NotFiniteError(f"the weights {name}", name.startswith("critic."))


def _refuse_broken(learner: Learner, chat: Chat, max_length: int) -> None:
    """Refuse a policy or critic that does not work, on the tokens of one question."""
    ids = chat.open([{"role": "user", "content": QUESTION}])[0][:max_length]
    batch = one_turn(ids[:1], ids[1:], (0.0,) * (len(ids) - 1))
    learner.logprobs(batch)
    if learner.critic is not None:
        learner.values(batch)


def one_turn(
    prompt: tuple[int, ...], completion: tuple[int, ...], logprobs: tuple[float, ...]
) -> Batch:
    """A batch of one episode of one turn."""
    before, sampled = len(prompt), len(completion)
    return collate(
        [
            Sample(
                prompt + completion,
                (False,) * before + (True,) * sampled,
                (0.0,) * before + logprobs,
                (-1,) * before + (0,) * sampled,
                (False,) * (before + sampled - 1) + (True,),
                0,
                0,
            )
        ]
    )


def trained_tensors(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """The weights that a checkpoint's model folder holds; names of one weight have one tensor."""
    if lora.has_adapters(model):
        return lora.adapter_tensors(model)
    return model.state_dict(keep_vars=True)


def _save(tensors: Mapping[str, Tensor], folder: Path, name: str, ranks: Ranks) -> None:
    full = gathered(tensors.items(), keep=ranks.rank == 0)

    def write() -> None:
        if ranks.rank == 0:
            written = {key: each.contiguous() for key, each in full.items()}
            save_file(written, folder / f"{name}.safetensors")

    ranks.together(write)


def _load(folder: Path, name: str, weight_of: Like, ranks: Ranks) -> dict[str, Tensor]:
    """The tensors of a name, each split as its weight."""
    path = folder / f"{name}.safetensors"

    def read() -> dict[str, Tensor]:
        try:
            with safe_open(path, "pt") as file:
                names = list(file.keys())
                return {key: like(weight_of(key), file.get_tensor(key)) for key in names}
        except (OSError, SafetensorError) as error:
            raise Damaged(path, error) from error

    return ranks.together(read)


def _saved_weights(folder: Path) -> dict[str, Tensor]:
    try:
        saved, _ = load_policy(str(folder), "cpu", "float32")
    except NotFiniteError:  # the weights are what was written
        raise
    except RagenError as error:
        raise Damaged(folder / "model.safetensors", error.__cause__ or error) from error
    return saved.state_dict()


def _restore(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], folder: Path) -> None:
    for name in sorted(weights.keys() | tensors.keys()):
        here = list(weights[name].shape) if name in weights else "missing"
        there = list(tensors[name].shape) if name in tensors else "missing"
        if here != there:
            raise RagenError(
                f"the checkpoint {folder} is of another model: {name} is {there} in it and {here} "
                "here; restore the model that the run began with"
            )
    fill(weights, tensors)
