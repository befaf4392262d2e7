"""A learner in several processes of one machine, for supervised training.

As in a `ProcessEngine`, the first is this process, all hold the whole weights, and each computes
its share of every minibatch. Nothing is played, so the processes have no sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from ragen.algorithms.batch import Batch
from ragen.cluster.child import Child, Host
from ragen.cluster.lost import answers_of
from ragen.cluster.process_engine import (
    killed_with_errors,
    refuse_other_weights,
    start_children,
    started,
)
from ragen.core.metrics import Metrics
from ragen.core.stopping import run_async
from ragen.learning.learner import Learner
from ragen.learning.models import Models
from ragen.learning.ranks import join_here, leave
from ragen.networks.machine import use_threads
from ragen.sampling.weights import checksums

T = TypeVar("T")

Load = Callable[[], PreTrainedModel]


class ChildHost(Host):
    """One of the other processes."""

    _learner: Learner

    async def ready(self) -> None:
        """Answers once all modules are loaded."""

    async def start(
        self, threads: int, load: Load, settings: Mapping[str, Any], *of_rank: Any
    ) -> None:
        """Load the model, and make a learner with these settings."""
        use_threads(threads)
        self._learner = Learner(_models(load, *of_rank), **settings)

    async def call(self, method: str, *arguments: Any) -> None:
        """Compute this process's share of a method."""
        getattr(self._learner, method)(*arguments)

    async def weights(self) -> dict[str, int]:
        """The checksums of the trained weights."""
        return checksums(self._learner.trained_weights())


def _models(load: Load, rank: int, size: int, store: str) -> Models:
    """The model, once all processes have met and loaded it; a failure of one is raised in all."""
    ranks = join_here(rank, size, store)
    return Models(ranks.together(load), ranks=ranks)


class SpreadLearner(Learner):
    """The first process's learner, whose `update` and `logprobs` are computed in all processes."""

    def __init__(self, children: list[Child], models: Models, settings: Mapping[str, Any]) -> None:
        super().__init__(models, **settings)
        self._children = children

    @override
    def update(self, batch: Batch, step: int) -> Metrics:
        return self._in_all(partial(super().update, batch, step), "update", batch, step)

    @override
    def logprobs(self, batch: Batch, reference: bool = False) -> tuple[Tensor, ...]:
        assert not reference, "supervised training has no reference"
        return self._in_all(partial(super().logprobs, batch), "logprobs", batch)

    def refuse_other_weights(self) -> None:
        """Raise `RagenError` if another process has trained to other weights."""
        found = [each.begin("weights").answer.result() for each in self._children]
        own = checksums(self.trained_weights())
        refuse_other_weights(self._children, found, own, "after training")

    def _in_all(self, own: Callable[[], T], method: str, *arguments: Any) -> T:
        """The result of `own`, which needs the others: they compute `method` at the same time."""

        async def here() -> T:
            return own()

        def end(_: Exception) -> None:
            for each in self._children:
                each.kill()

        async def every() -> T:
            begun = [(each, each.begin("call", method, *arguments)) for each in self._children]
            calls = [here(), *(each.wait(call) for each, call in begun)]
            result: T = (await answers_of(calls, end))[0]
            return result

        return run_async(every())


@contextmanager
def learner_in(
    processes: int, model: PreTrainedModel, load: Load, **settings: Any
) -> Iterator[Learner]:
    """A learner of `model` in several processes, or a plain one; its `settings` are `Learner`'s.

    `load` makes the same model in another process: a function of a module, with its arguments. At
    the end the weights of all processes are compared.

    Raises:
        EngineLost: A process has ended.
        RagenError: There is a GPU, or the weights differ.
    """
    if processes == 1:
        yield Learner(Models(model), **settings)
        return
    children = start_children(processes, ChildHost.__module__)
    arguments = torch.get_num_threads(), load, settings
    models = started(children, arguments, partial(_models, lambda: model))
    try:
        with killed_with_errors(children):
            learner = SpreadLearner(children, models, settings)
            yield learner
            learner.refuse_other_weights()
            for each in children:
                each.end()
    finally:
        leave(models.ranks)
