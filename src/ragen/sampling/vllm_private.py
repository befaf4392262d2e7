"""The private parts of vLLM that RAGEN uses; they change between releases, so these are pinned.

They are an engine's processes, and the workers' models with their layers and adapters. A worker
runs in the process of its engine, or with tensor parallelism in one of several processes, each with
a part of most weights. vLLM fuses some of a checkpoint's weights (queries, keys and values; gate
and up). The functions that RAGEN calls in workers take weights over, and compare every weight, bit
for bit, with what vLLM computes with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

RELEASES = ("0.32", "0.33")
"""The releases of vLLM that RAGEN knows, as in ``pyproject.toml``. The tests run with 0.32, the
last that is built for CPUs; what RAGEN uses is the same in the source of 0.33."""

ADAPTER_ID = 1
"""The number of the policy's adapter in vLLM."""

Weights = Sequence[tuple[str, Tensor]] | Path
"""Weights as in a checkpoint, or the file in which another process reads them."""


def is_known(version: str) -> bool:
    """True if a version of vLLM is of one of `RELEASES`."""
    return version.startswith(tuple(f"{each}." for each in RELEASES))


def take(worker: Any, weights: Weights, packs: bool) -> list[str]:
    """Replace a worker's weights; returns the names of those that it does not hold afterwards.

    `packs` says that the worker computes with packed copies of weights, as on a CPU.
    """
    tensors = tensors_of(weights)
    worker.reload_weights(weights_iterator=iter(tensors))
    model = worker.get_model()
    if packs:
        _pack_output_layer(model)
    return differing(model, tensors)


def tensors_of(weights: Weights) -> Sequence[tuple[str, Tensor]]:
    """The weights, in this process."""
    return list(load_file(weights).items()) if isinstance(weights, Path) else weights


def _pack_output_layer(model: Any) -> None:
    """Rebuild the packed output layer of a CPU: loading misses it if the embedding is tied."""
    head = getattr(model, "lm_head", None)
    if head is not None:
        head.quant_method.process_weights_after_loading(head)


@torch.no_grad()
def differing(model: Any, tensors: Sequence[tuple[str, Tensor]]) -> list[str]:
    """The names of the weights that a worker's model holds with other values.

    Weights of layers with a special layout in vLLM, such as a mixture's experts, are not compared.
    """
    modules = dict(model.named_modules())
    packed = getattr(model, "packed_modules_mapping", {})
    fused = {part: (whole, k) for whole, parts in packed.items() for k, part in enumerate(parts)}
    found = []
    for name, tensor in tensors:
        path, _, kind = name.rpartition(".")
        number = 0
        if path not in modules:
            parent, _, own = path.rpartition(".")
            whole, number = fused.get(own, (own, 0))
            path = f"{parent}.{whole}"
        if path not in modules:
            continue
        for module in _tied(modules, modules[path]):
            part = _part(module, kind, number, tensor)
            for held in _held(module, kind):
                if not _equal(held, *part):
                    found.append(name)
    return sorted(set(found))


def _tied(modules: Mapping[str, Any], module: Any) -> Iterator[Any]:
    """A module, and the output layer if that computes with its weights."""
    yield module
    head = modules.get("lm_head")
    if head is not None and head is not module:
        weight = getattr(head, "weight", None)
        if weight is not None and weight is getattr(module, "weight", None):
            yield head


def _held(module: Any, kind: str) -> Iterator[Tensor]:
    """The weights that a module computes with: one, and on a CPU the packed copy of a matrix.

    A packed copy is read through a product with the identity, whose sums have one term.
    """
    weight = getattr(module, kind, None)
    if weight is None:
        return
    if weight.numel():
        yield weight
    multiply = getattr(module, "cpu_linear", None)
    looks_up = _is(module, "VocabParallelEmbedding") and not _is(module, "ParallelLMHead")
    if kind == "weight" and multiply is not None and not looks_up:
        width = getattr(module, "input_size_per_partition", None)
        width = width or getattr(module, "input_size", None) or module.embedding_dim
        yield multiply(torch.eye(width, dtype=weight.dtype), weight, None).T


Part = tuple[slice, Tensor]
"""The rows of a module's tensor, and the tensor that they should equal."""


def _part(module: Any, kind: str, number: int, tensor: Tensor) -> Part:
    """Where a worker should have its part of a tensor, the one of that number in a fused layer."""
    if _is(module, "VocabParallelEmbedding"):
        indices = module.shard_indices
        start, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        return slice(end - start), tensor[start:end]
    if _is(module, "RowParallelLinear") and kind == "weight":
        width = module.input_size_per_partition
        return slice(None), tensor.narrow(1, module.tp_rank * width, width)
    if not _is(module, "ColumnParallelLinear"):
        return slice(None), tensor
    rank, sizes = module.tp_rank, [module.output_size_per_partition]
    if _is(module, "QKVParallelLinear"):
        heads = module.num_heads, module.num_kv_heads, module.num_kv_heads
        widths = module.head_size, module.head_size, module.v_head_size
        sizes = [count * width for count, width in zip(heads, widths, strict=True)]
        if number:
            rank //= module.num_kv_head_replicas
    elif _is(module, "MergedColumnParallelLinear"):
        sizes = [size // module.tp_size for size in module.output_sizes]
    starts = [0, *accumulate(sizes)]
    size = sizes[number]
    return slice(starts[number], starts[number + 1]), tensor.narrow(0, rank * size, size)


def _is(module: Any, name: str) -> bool:
    """True if a module is one of vLLM's of this class, which is imported elsewhere."""
    return any(each.__name__ == name for each in type(module).__mro__)


def _equal(held: Tensor, rows: slice, expected: Tensor) -> bool:
    return torch.equal(held[rows], expected.to(held.device, held.dtype))


@torch.no_grad()
def differing_adapter(worker: Any, weights: Weights, scale: float) -> list[str]:
    """The matrices of an adapter that differ, named as in its folder; `scale` is α / r.

    vLLM multiplies B by the scale when it takes an adapter over.
    """
    tensors = dict(tensors_of(weights))
    manager = worker.model_runner.lora_manager._adapter_manager
    if ADAPTER_ID not in manager.lora_index_to_id:
        return sorted(tensors)
    slot, found = manager.lora_index_to_id.index(ADAPTER_ID), list[str]()
    for path, module in manager.modules.items():
        paths = manager.packed_modules.get(path, [path])
        stacked = {"A": module.lora_a_stacked, "B": module.lora_b_stacked}
        for matrix, every in stacked.items():
            names = [f"base_model.model.{each}.lora_{matrix}.weight" for each in paths]
            given: Any = [tensors.get(name) for name in names]
            if matrix == "B":
                dtype = every[0].dtype
                given = [each if each is None else each.to(dtype) * scale for each in given]
            parts = _adapter_parts(module, matrix, given)
            for name, part, held in zip(names, parts, every, strict=True):
                own = held[slot, 0]
                expected = torch.zeros_like(own)
                if part is not None:
                    expected[: part.shape[0], : part.shape[1]] = part
                if not torch.equal(own, expected):
                    found.append(name)
    return sorted(set(found))


def _adapter_parts(module: Any, matrix: str, given: Any) -> Any:
    """A worker's parts of a layer's matrices A or B, one for each layer that vLLM has fused."""
    if module.tp_size == 1:
        return given
    cut = module.slice_lora_a if matrix == "A" else module.slice_lora_b
    if len(given) > 1:
        return cut(given)
    return given if given[0] is None else [cut(given[0])]


def has_failed(engine: Any) -> bool:
    """True if one of several workers of an engine has ended."""
    failed: bool = engine.engine_core.engine_core.model_executor.is_failed
    return failed


def shut_down(engine: Any) -> None:
    """End an engine in this process, which has no public way to do so."""
    engine.engine_core.shutdown()
