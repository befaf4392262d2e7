"""Counts what makes the host wait for a device, on one that has shapes but no numbers."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

DEVICE = "meta"
SHAPELESS = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive"}
"""Operators whose result has a shape that only the device knows."""


def _is_on(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.device.type == DEVICE


class Waits(TorchDispatchMode):
    """Counts waits by operator, and answers the host with ones where it reads the device.

    A GPU is waited for when a number of it is read, when a tensor of it is copied to the host, when
    the host's memory is copied to it without `non_blocking`, and when the shape of a result depends
    on numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            target = args[0] if name == "copy_" else None
            source = args[1] if name == "copy_" else args[0]
            to = target.device if target is not None else kwargs.get("device", source.device)
            if _is_on(source) and torch.device(to).type == "cpu":
                self.counts["to the host"] += 1
                dtype = kwargs.get("dtype") or source.dtype
                return torch.ones(source.shape, dtype=dtype) if target is None else target.fill_(1)
            blocks = not (args[2:3] or [kwargs.get("non_blocking")])[0]
            if not _is_on(source) and torch.device(to).type == DEVICE and blocks:
                self.counts["to the device"] += 1
        elif any(_is_on(each) for each in tree_leaves((args, kwargs))):
            if name == "_local_scalar_dense":
                self.counts["number"] += 1
                return torch.ones((), dtype=args[0].dtype).item()
            masks = name.startswith("index") and any(
                each.dtype in (torch.bool, torch.uint8) or not _is_on(each)
                for each in tree_leaves(args[1])
                if isinstance(each, Tensor)
            )
            if name in SHAPELESS or masks:
                self.counts[name] += 1
        return func(*args, **kwargs)
