"""The learner: scores batches and takes optimiser steps; every engine uses it.

It works on tensors and a few numbers, and knows no environment, sampler or estimator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ragen.algorithms.batch import Batch, TokenFields, flatten, padding, row_splits, take
from ragen.algorithms.losses import (
    Loss,
    Measured,
    correct_for_sampler,
    entropy_bonus,
    find_loss,
    kl_loss,
    mismatch_kl,
    needs_whole_episodes,
    policy_loss,
    read,
    token_weights,
    value_loss,
)
from ragen.config.sections import LossConfig, UpdateConfig
from ragen.core.errors import MismatchError, NotFiniteError
from ragen.core.metrics import Metric, Metrics, largest, last, mean, merge, total
from ragen.core.pictures import Picture
from ragen.core.types import Role, TokenRows
from ragen.learning.exactness import verify, verify_num_rows, verify_share
from ragen.learning.models import Models
from ragen.learning.optimizers import WEIGHT_DECAY, optimizers
from ragen.networks.lora import acting
from ragen.networks.precision import Masters
from ragen.networks.sharding import whole

SHARED_VALUE_WEIGHT = 0.5
"""Weight of the critic's loss on a backbone shared with the policy: c₁ of arXiv:1707.06347, with
the value of its authors' code."""

MAX_GRAD_NORM = 1.0
"""Bound on a gradient's norm, as published (arXiv:2504.20073)."""

VALUE_CLIP = 0.5
"""How far a value may move from the one that the advantages were computed with
(arXiv:2504.20073)."""

IMPORTANCE_CAP = 2.0
"""Largest weight that corrects for a sampler whose arithmetic is not the learner's."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The difference that sampler and learner may have.

    Attributes:
        bound: The largest difference, in nats, of a sampled and a recomputed logprob at equal
            weights that rounding explains.
        is_refused: A larger difference is an error.
        on_policy: The present weights sampled the tokens that are trained on. If earlier weights
            may have sampled them, a difference is not a mismatch.
    """

    bound: float = math.inf
    is_refused: bool = False
    on_policy: bool = True


UNBOUNDED = Mismatch()


class _Passed(NamedTuple):
    """Results of the forward and backward passes of one update, by microbatch.

    Losses are scalars. `compared` are token ids, sampled and recomputed logprobs, (N,) each.
    """

    metrics: list[Mapping[str, Metric | Measured]]
    losses: list[Tensor]
    critic_losses: list[Tensor]
    compared: list[tuple[Tensor, ...]]


class Learner:
    """The optimisers of a policy and its critic, and the updates of their weights.

    Trained weights that are not float32 get a float32 master (`ragen.networks.precision.Masters`).

    With several ranks (`Models`) each process has its own learner, which computes its share of a
    batch, and keeps a part of every optimiser's state if the weights are split. All processes call
    the same methods at the same time with the same arguments, and get the same results.

    Args:
        steps: The length of the run, over which the learning rate decays, as in `Config.budget`.
        longest: The maximum number of sampled tokens in an episode.
        muon_lr: The learning rate of Muon, which then trains the weight matrices; 0 for AdamW only.
    """

    def __init__(
        self,
        models: Models,
        update: UpdateConfig,
        loss: LossConfig,
        *,
        steps: int = 1,
        longest: int = 1,
        mismatch: Mismatch = UNBOUNDED,
        muon_lr: float = 0.0,
        weight_decay: float = WEIGHT_DECAY,
    ) -> None:
        self.models, self.ranks = models, models.ranks
        self.model, self.critic, self.reference = models.policy, models.critic, models.reference
        self.masters = Masters(models.trained.named_parameters())
        self.critic_masters = Masters(self.critic.named_parameters() if self.critic else ())
        make = partial(optimizers, beta2=update.beta2, muon_lr=muon_lr, weight_decay=weight_decay)
        self.optimizers = make(self.masters.trained, update.lr)
        critic_trained = self.critic_masters.trained
        self.critic_optimizers = make(critic_trained, update.critic_lr) if self.critic else []
        self.synced = True
        self._update, self._loss, self._mismatch = update, loss, mismatch
        self._steps, self._longest = steps, longest

    @property
    def _samples_now(self) -> bool:
        """True if the present weights sampled the tokens that are trained on."""
        return self.synced and self._mismatch.on_policy

    def named_optimizers(self) -> dict[str, Optimizer]:
        """Every optimiser by the name it is saved under."""
        named = {f"optimizer-{number}": each for number, each in enumerate(self.optimizers)}
        critics = enumerate(self.critic_optimizers)
        return named | {f"critic-optimizer-{number}": each for number, each in critics}

    def named_masters(self) -> dict[str, Masters]:
        """The float32 masters of lower-precision weights, by the name they are saved under."""
        named = {"masters": self.masters, "critic-masters": self.critic_masters}
        return {name: masters for name, masters in named.items() if masters.tensors()}

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that updates change, by name: the policy's, then the critic's."""
        modules = {"policy": self.models.trained, "critic": self.critic}
        for role, module in modules.items():
            for name, weights in module.named_parameters() if module is not None else ():
                if weights.requires_grad:
                    yield f"{role}.{name}", weights.detach()

    def score(self, batch: Batch, role: Role) -> Batch:
        """The batch with the scores of its trained tokens by `role` (`Engine.score`).

        Raises:
            NotFiniteError: A number is not finite.
        """
        if role == "critic":
            return replace(batch, values_BT=self.values(batch))
        logprobs_BT, entropies_BT = self.logprobs(batch, reference=role == "reference")
        if role == "reference":
            return replace(batch, reference_logprobs_BT=logprobs_BT)
        return replace(batch, old_logprobs_BT=logprobs_BT, entropies_BT=entropies_BT)

    @torch.no_grad()
    def logprobs(self, batch: Batch, reference: bool = False) -> tuple[Tensor, ...]:
        """Logprobs and entropies ``(B, T)`` of the trained tokens, by policy or reference.

        Raises:
            NotFiniteError: A number is not finite.
        """
        with acting(self.model, "reference" if reference else "policy"):
            fields = self._per_token(batch, lambda part: self.models.logprobs(part, reference))
        return _finite(f"the logprobs of the {'reference' if reference else 'policy'}", *fields)

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        """The critic's estimate ``(B, T)`` of the state before each trained token.

        Raises:
            NotFiniteError: A number is not finite.
        """
        assert self.critic is not None, "this learner trains no critic"
        with acting(self.model, "policy" if self.critic.shared else "critic"):
            fields = self._per_token(batch, lambda part: (self.models.values(part),))
        (values_BT,) = _finite("the critic's values", *fields, of_critic=True)
        return values_BT

    @torch.no_grad()
    def cross_scores(
        self, prompts: TokenRows, thoughts: TokenRows, pictures: Sequence[Picture] = ()
    ) -> Tensor:
        """Log-probability of each thought under each prompt, (N, M).

        Raises:
            NotFiniteError: A score is NaN; −∞ is the score of an impossible thought.
        """
        most = self._update.microbatch_tokens
        scores_NM = self.models.cross_scores(prompts, thoughts, most, pictures)
        _finite("the scores of thoughts", scores_NM.exp())
        return scores_NM

    def gradient_norms(self, batch: Batch, bucket_B: Tensor) -> Metrics:
        """Norms of the policy's gradient for each term of the loss and each bucket of rows.

        Metrics are ``<bucket>/<term>_per_token`` and ``…_per_sample``. With ℓ_t the unweighted
        value of a term at sampled token t,

            per_token = ‖∇ Σ_t ℓ_t‖ ÷ tokens      per_sample = ‖∇ Σ_t ℓ_t‖ ÷ samples

        The terms: ``task``, the policy loss (a KL penalty in the reward is part of it);
        ``entropy``; ``kl``, by k2, because on-policy it has the gradient of the reverse KL. The
        batch has old logprobs and advantages, and reference logprobs for ``kl``. Weights, their
        stored gradients, optimisers and random generators are not changed.
        """
        batch = replace(batch, weight_BT=batch.mask_BT.float())
        metrics: Metrics = {}
        for bucket in sorted(set(bucket_B.tolist())):
            part = take(batch, (bucket_B == bucket).nonzero()[:, 0])
            for term, norm in self._term_norms(part).items():
                metrics[f"{bucket}/{term}_per_token"] = last(norm / part.num_tokens)
                metrics[f"{bucket}/{term}_per_sample"] = last(norm / part.num_rows)
        return metrics

    def _term_norms(self, batch: Batch) -> dict[str, float]:
        if self.ranks.size > 1:
            return self._term_norms_of_ranks(batch)
        trained = [p for p in self.models.trained.parameters() if p.requires_grad]
        sums: dict[str, Sequence[Tensor]] = {}
        for rows in self._microbatches(batch):
            for term, loss in self._terms(take(batch, rows)).items():
                # Not `backward`, which would leave gradients behind for the next update.
                found = torch.autograd.grad(
                    loss.value, trained, retain_graph=True, materialize_grads=True
                )
                known, new = sums.get(term), [each.float() for each in found]
                sums[term] = [a + b for a, b in zip(known, new, strict=True)] if known else new
        return {term: float(nn.utils.get_total_norm(total)) for term, total in sums.items()}

    def _term_norms_of_ranks(self, batch: Batch) -> dict[str, float]:
        """The norms with several ranks, whose gradients are added up where they are stored."""
        norms = {}
        own, idle = self._passes(batch)
        masters = self.masters.trained.values()
        for term in ("task", "entropy", "kl")[: 2 + (batch.reference_logprobs_BT is not None)]:
            for number, rows in enumerate(passes := own + idle):
                self.models.units.begin_pass(number == len(passes) - 1)
                _backward(self._terms(take(batch, rows))[term], float(number < len(own)))
            self.models.units.rest()
            self._add_up(self.masters)
            gradients = [master.grad for master in masters if master.grad is not None]
            norms[term] = float(whole(nn.utils.get_total_norm(gradients)))
            for master in masters:
                master.grad = None  # an update begins without gradients
        return norms

    def _add_up(self, masters: Masters) -> None:
        """Add up the gradients of whole weights over the ranks; split weights do it themselves.

        A weight may have none here, such as that of an expert that no token of this share chose.
        """
        if self.ranks.size == 1 or self.ranks.splits_weights or not masters.trained:
            return
        weights = list(masters.trained.values())
        found = self.ranks.sum(torch.tensor([each.grad is not None for each in weights]).int())
        trained = [each for each, count in zip(weights, found.tolist(), strict=True) if count]
        for each in trained:
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        self.ranks.add_up([each.grad for each in trained if each.grad is not None])

    def _terms(self, part: Batch) -> dict[str, Loss]:
        tokens = flatten(part).to(self.models.device)
        logprobs_N, entropies_N = self.models.logprobs(part)
        terms = {
            "task": self._task_loss(logprobs_N, tokens),
            "entropy": entropy_bonus(entropies_N, tokens),
        }
        if tokens.reference_logprobs_N is not None:
            terms["kl"] = kl_loss(logprobs_N, tokens, kind="k2")
        return terms

    def _per_token(
        self, batch: Batch, compute: Callable[[Batch], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Fill ``(B, T)`` fields with what `compute` returns for each microbatch."""
        places, pieces = [torch.zeros(2, 0, dtype=torch.long)], []
        own, idle = self._passes(batch)
        for rows in own:
            part = take(batch, rows)
            wanted = (part.weight_BT > 0).nonzero(as_tuple=True)
            places.append(torch.stack([rows[wanted[0]], wanted[1]]))
            pieces.append([field.float() for field in compute(part)])
        for rows in idle:
            unused = compute(take(batch, rows))
            pieces = pieces or [[field[:0].float() for field in unused]]
        self.models.units.rest()
        row_N, column_N = torch.cat(places, dim=1)
        fields = []
        for field in zip(*pieces, strict=True):
            field_BT = torch.zeros_like(batch.weight_BT)
            field_BT[row_N, column_N] = torch.cat(field).cpu()  # the only wait for a GPU
            fields.append(self.ranks.sum(field_BT))
        return tuple(fields)

    def _microbatches(self, batch: Batch) -> list[Tensor]:
        return self._splits(batch)[self.ranks.rank]

    def _passes(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """The rows of each microbatch of this process, and of those that it computes in vain.

        Processes gather split weights for each other, so one with fewer computes the shortest row
        again. With whole weights, only one that has no rows computes it, for gradients of 0.
        """
        splits = self._splits(batch)
        own = splits[self.ranks.rank]
        most = max(map(len, splits)) if self.ranks.splits_weights else 1
        lengths_B = batch.lengths_B.where((batch.weight_BT > 0).any(1), batch.lengths_B.max() + 1)
        return own, [lengths_B.argmin()[None]] * (most - len(own))

    def _splits(self, batch: Batch) -> list[list[Tensor]]:
        settings = (
            self._update.microbatch_tokens,
            self.models.shares_prompts,
            needs_whole_episodes(find_loss(self._loss.name)),
        )
        if self.ranks.size == 1:
            return [row_splits(batch, *settings)]
        return [
            [rows_B[rows] for rows in row_splits(take(batch, rows_B), *settings)]
            if len(rows_B)
            else []
            for rows_B in self.ranks.shares(batch, self.models.shares_prompts)
        ]

    def update(self, batch: Batch, step: int) -> Metrics:
        """One optimiser step of the policy and one of the critic on one minibatch.

        A loss or gradient that is not finite is never applied: the update is skipped and counted in
        ``update/skipped``.

        The minibatch has old logprobs and advantages (values and returns for the critic, reference
        logprobs for a KL term) unless the loss is nll. The first update of a collection needs no
        old logprobs: they are what it computes. `step` sets the learning rate (`Engine.update`).

        Raises:
            RagenError: The tokens to be trained are not those that were sampled.
            MismatchError: With the weights that sampled them, they get other logprobs.
        """
        weights_BT = token_weights(batch, self._loss.aggregation, self._longest)
        passed = self._compute_gradients(replace(batch, weight_BT=weights_BT))
        trained = [("policy", self.optimizers, self.masters, passed.losses)]
        if self.critic is not None:
            losses = passed.losses if self.critic.shared else passed.critic_losses
            trained.append(("critic", self.critic_optimizers, self.critic_masters, losses))
        norms = [
            whole(nn.utils.clip_grad_norm_(masters.trained.values(), MAX_GRAD_NORM))
            for _, _, masters, _ in trained
        ]
        finite = [torch.stack(losses or [norms[0]]).isfinite().all() for *_, losses in trained]
        # The only wait for a GPU: all gradients are computed, and no weight is changed yet.
        read_parts, numbers = read(passed.metrics, *norms, *finite)
        every = self.ranks.gather((merge(read_parts), numbers))
        metrics = merge(part for part, _ in every)
        numbers = [min(each) for each in zip(*(found for _, found in every), strict=True)]
        self._refuse_mismatch(metrics, passed.compared)
        scale = self._learning_rate(step)
        parts = zip(trained, numbers[: len(norms)], numbers[len(norms) :], strict=True)
        for (name, steppers, masters, _), norm, is_finite in parts:
            metrics |= self._apply(name, steppers, masters, scale, norm, bool(is_finite))
        self.synced = False
        return metrics | {"update/lr": last(self._update.lr * scale), "update/count": total(1)}

    def _compute_gradients(self, batch: Batch) -> _Passed:
        own, idle = self._passes(batch)
        microbatches = [take(batch, rows) for rows in own]
        passed = _Passed([self._verify(batch, microbatches)], [], [], [])
        if own and not self.models.shares_prompts:  # with shared prompts rows are not padded
            passed.metrics.append(padding(microbatches))
        num_passes = len(own) + len(idle)
        for number, part in enumerate(chain(microbatches, (take(batch, rows) for rows in idle)), 1):
            is_own = number <= len(own)
            self.models.units.begin_pass(number == num_passes)
            tokens = flatten(part).to(self.models.device)
            loss, logprobs_N = self._policy_backward(part, tokens, float(is_own))
            if is_own:
                passed.losses.append(loss.value.detach())
                passed.metrics.append(loss.metrics)
                compared = tokens.token_ids_N, tokens.sampled_logprobs_N, logprobs_N
                passed.compared.append(compared)
            if self.critic is not None and not self.critic.shared:
                loss = self._critic_backward(part, tokens, float(is_own))
                if is_own:
                    passed.critic_losses.append(loss.value.detach())
                    passed.metrics.append(loss.metrics)
        self.models.units.rest()
        self._add_up(self.masters)
        self._add_up(self.critic_masters)
        return passed

    def _verify(self, batch: Batch, microbatches: list[Batch]) -> Metrics:
        """Verify what this process trains on; if one process refuses its part, all do."""
        if self.ranks.size == 1:
            return verify(microbatches)
        checked = self.ranks.together(lambda: verify_share(batch, microbatches))
        num_rows = sum(part.num_rows for part in microbatches)
        verify_num_rows(batch, int(self.ranks.sum(torch.tensor(num_rows))))
        return checked

    def _policy_backward(
        self, part: Batch, tokens: TokenFields, scale: float
    ) -> tuple[Loss, Tensor]:
        """Gradients of the policy's and a shared critic's loss; returns the logprobs (N,) too."""
        scores = self.models.logprobs_and_values(part, tokens.token_ids_N)
        logprobs_N, entropy_N, *values = scores
        loss = self._policy_loss(tokens, logprobs_N, entropy_N)
        for values_N in values:
            value = value_loss(values_N, tokens, value_clip=VALUE_CLIP)
            both = SHARED_VALUE_WEIGHT * value.value + loss.value
            loss = Loss(both, value.metrics | loss.metrics)
        _backward(loss, scale)
        return loss, logprobs_N.detach()

    def _critic_backward(self, part: Batch, tokens: TokenFields, scale: float) -> Loss:
        with acting(self.model, "critic"):
            loss = value_loss(self.models.values(part), tokens, value_clip=VALUE_CLIP)
            _backward(loss, scale)
        return loss

    def _policy_loss(self, tokens: TokenFields, logprobs_N: Tensor, entropy_N: Tensor) -> Loss:
        settings = self._loss
        bonus = entropy_bonus(entropy_N, tokens)
        if settings.name == "nll":
            loss = self._task_loss(logprobs_N, tokens)
            return Loss(loss.value, loss.metrics | bonus.metrics)
        if tokens.old_logprobs_N is None:
            assert self._samples_now, "old logprobs come from the weights that sampled"
            tokens = replace(tokens, old_logprobs_N=logprobs_N.detach())
        tokens, metrics = correct_for_sampler(tokens, IMPORTANCE_CAP)
        loss = self._task_loss(logprobs_N, tokens)
        value = loss.value + settings.entropy * bonus.value
        metrics |= loss.metrics | bonus.metrics
        if self._samples_now:
            metrics |= mismatch_kl(tokens.sampled_logprobs_N, logprobs_N.detach())
            metrics["mismatch/bound"] = largest(self._mismatch.bound)
        if settings.kl > 0 and settings.kl_kind != "k1":
            term = kl_loss(logprobs_N, tokens, kind=settings.kl_kind)
            value = value + settings.kl * term.value
            metrics |= term.metrics
        return Loss(value, metrics)

    def _refuse_mismatch(self, metrics: Metrics, compared: list[tuple[Tensor, ...]]) -> None:
        """Refuse a ``mismatch/max_abs`` beyond rounding; no later update gets its gradients."""
        gap, bound = metrics.get("mismatch/max_abs"), self._mismatch.bound
        if self._mismatch.is_refused and gap is not None and not gap.value <= bound:
            worst = [_worst(*map(torch.cat, zip(*compared, strict=True)))] if compared else []
            worst = list(chain.from_iterable(self.ranks.gather(worst)))
            token, sampled, recomputed = max(worst, key=_difference)
            for optimizer in self.named_optimizers().values():
                optimizer.zero_grad(set_to_none=True)
            raise MismatchError(token, sampled, recomputed, bound)

    def _task_loss(self, logprobs_N: Tensor, tokens: TokenFields) -> Loss:
        settings = self._loss
        return policy_loss(
            find_loss(settings.name),
            logprobs_N,
            tokens,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
        )

    def _apply(
        self,
        name: str,
        optimizers: list[Optimizer],
        masters: Masters,
        scale: float,
        norm: float,
        is_finite: bool,
    ) -> Metrics:
        """Step on gradients of this norm, unless they or their losses are not finite."""
        is_finite = is_finite and math.isfinite(norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_lr"] * scale
            if is_finite:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        masters.round()
        return {
            f"gradient/{name}_norm": mean(norm),
            f"gradient/{name}_norm_max": largest(norm),
            f"update/skipped_{name}": total(not is_finite),
        }

    def _learning_rate(self, step: int) -> float:
        """The learning rate's factor at `step`: linear warm-up, then linear decay to `lr_end`."""
        update = self._update
        rise = min(1.0, (step + 1) / (update.warmup_steps + 1))
        left = 1 - min(1.0, step / max(1, self._steps))
        return rise * (update.lr_end + (1 - update.lr_end) * left)


def _backward(loss: Loss, scale: float) -> None:
    value = loss.value if scale == 1.0 else scale * loss.value
    value.backward()  # type: ignore[no-untyped-call]


def _worst(ids_N: Tensor, sampled_N: Tensor, recomputed_N: Tensor) -> tuple[int, float, float]:
    worst = int((recomputed_N - sampled_N).abs().argmax())  # a NaN is the largest
    return int(ids_N[worst]), float(sampled_N[worst]), float(recomputed_N[worst])


def _difference(scored: tuple[int, float, float]) -> tuple[bool, float]:
    """How far a token's logprobs differ; NaN is farthest."""
    difference = abs(scored[2] - scored[1])
    return math.isnan(difference), difference


def _finite(numbers: str, *fields: Tensor, of_critic: bool = False) -> tuple[Tensor, ...]:
    """The fields, which are on the CPU."""
    if not all(bool(field.isfinite().all()) for field in fields):
        raise NotFiniteError(numbers, of_critic)
    return fields
