"""The local engine: a learner and a sampler in one process, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ragen.algorithms.advantages import find_estimator
from ragen.algorithms.batch import Batch, collate
from ragen.algorithms.estimator import needs_values
from ragen.config.config import Config
from ragen.config.sections import most_turns
from ragen.core.errors import NotFiniteError, RagenError
from ragen.core.metrics import Metrics, largest
from ragen.core.types import Prompt, Role, Sample
from ragen.engines.engine import Late
from ragen.engines.factory import load_model, make_sampler, prepare_model
from ragen.engines.learner import Learner
from ragen.engines.optimizers import optimizer_tensors, restore_optimizer
from ragen.engines.sampler import Sampler
from ragen.engines.sampler_server import VllmServer
from ragen.engines.sampler_vllm import VllmSampler
from ragen.engines.sampling import Stats
from ragen.models import lora
from ragen.models.adapter_folder import fingerprint_of_base, hash_tensors, load_adapter
from ragen.models.loading import load_policy, save_model
from ragen.models.precision import Masters
from ragen.rollout.chat import Chat
from ragen.rollout.setup import make_chat
from ragen.storage.checkpoint import Damaged

TOLERANCES = {"float32": 1e-2, "bfloat16": 0.5}
"""Largest allowed difference of a logprob, in nats, between two programs with the same weights.

On a CPU float32 agrees to 1e-5; on a GPU its products may be rounded to the 10 bits of TF32, some
1e-3 of a logit. A bfloat16 logit between 16 and 32 is a multiple of 1/8, and another order of
summation changes it, or a competing logit, by a few of these multiples."""

ONE_ARITHMETIC_TOLERANCE = 1e-3
"""As `TOLERANCES`, for a sampler that computes as the learner does, at temperatures from 1 on. The
worst of 50,000 tokens of a trained model differs by 1.1e-4; a lower temperature divides the logits,
and their rounding with them."""

QUESTION = "Count from one to ten, then say which of the numbers you like best."
NUM_TOKENS = 16
"""Most tokens that are compared."""


class LocalEngine:
    """The `Engine` of one process, on CPU or one GPU.

    `policy` samples with the weights of the last `publish`. The local sampler reads the learner's
    weights in place, so publishing only drops the cache of keys and values. vLLM has weights of its
    own, so publishing pushes the learner's and checks that they arrived (`check_parity`). `path` is
    the folder or hub id of the policy's first weights.

    Raises:
        RagenError: The model cannot be loaded or has no usable chat template, vLLM cannot serve
            it, or the KL reference would not be the policy that the run begins with.
    """

    def __init__(self, config: Config, path: str) -> None:
        self.model, self.tokenizer = load_model(config, path)
        guard = config.guard
        if config.lora.rank and config.may_use_kl and lora.has_adapters(self.model):
            raise RagenError(
                "the KL reference is the policy that the run begins with, but with LoRA it is the "
                'base without an adapter: set loss.kl = 0 and no guard.remedy = "kl", or merge the '
                "adapter first (for a run: `ragen export RUN --merge`) and name the merged model"
            )
        critic = needs_values(find_estimator(config.advantage.name))
        self.model = prepare_model(config, path, self.model, critic)
        # Recorded also without a KL term, which may come later. LoRA identifies its base itself.
        self._first = None if config.lora.rank else hash_tensors(self.model.state_dict().items())
        self.chat = make_chat(config, self.tokenizer)
        self.version = 0
        sampler, temperature = config.rollout.sampler, config.rollout.temperature
        exact = config.one_arithmetic
        bound = ONE_ARITHMETIC_TOLERANCE if exact else TOLERANCES[config.model.dtype]
        self.policy = make_sampler(sampler, config, self.model, self.chat, path)
        self.policy.source = path
        self.learner = Learner(
            self.model,
            config.update,
            config.loss,
            critic=critic,
            shared=config.model.critic == "shared",
            reference=config.loss.kl > 0,
            steps=config.steps,
            temperature=temperature,
            longest=most_turns(config.env) * config.rollout.max_tokens,
            mismatch_bound=bound / min(1.0, temperature),
            on_policy=config.engine.max_staleness == 0,
            refuses_mismatch=exact and guard.responses.get("mismatch", "stop") == "stop",
        )
        self._dtype, self._temperature = config.model.dtype, temperature
        self._parity = self._check_parity()

    @cached_property
    def _base(self) -> str | None:
        """The fingerprint of the adapters' base, which never changes."""
        return fingerprint_of_base(self.model) if lora.has_adapters(self.model) else None

    async def score(self, batch: Batch, role: Role) -> Batch:
        """See `Engine.score`."""
        self.policy.rest()
        if role == "critic":
            return replace(batch, values_BT=self.learner.values(batch))
        logprobs_BT, entropies_BT = self.learner.logprobs(batch, reference=role == "reference")
        if role == "reference":
            return replace(batch, reference_logprobs_BT=logprobs_BT)
        return replace(batch, old_logprobs_BT=logprobs_BT, entropies_BT=entropies_BT)

    async def update(self, batch: Batch, step: int) -> Metrics:
        """See `Engine.update`."""
        assert batch.born_BK is not None, (
            "a run trains on sampled tokens and verifies their fingerprints"
        )
        self.policy.rest()
        return self.learner.update(batch, step)

    async def cross_scores(
        self, prompts: Sequence[Sequence[int]], thoughts: Sequence[Sequence[int]]
    ) -> Tensor:
        """See `Engine.cross_scores`."""
        self.policy.rest()
        return self.learner.cross_scores(prompts, thoughts)

    async def gradient_norms(self, batch: Batch, bucket_B: Tensor) -> Metrics:
        """See `Learner.gradient_norms`."""
        self.policy.rest()
        return self.learner.gradient_norms(batch, bucket_B)

    async def publish(self) -> None:
        """See `Engine.publish`."""
        self.version += 1
        await self._push()

    async def _push(self) -> None:
        await self.policy.publish(self.model, self.version)
        self.learner.synced = True
        self._parity = self._check_parity()

    def _check_parity(self) -> Metrics:
        """The difference between sampler and learner, if the sampler has weights of its own."""
        if isinstance(self.policy, Sampler):
            return {}
        return check_parity(self.policy, self.learner, self.chat, self._temperature, self._dtype)

    def forget(self) -> None:
        """See `Engine.forget`."""
        self.policy.forget()
        self.policy.stats = Stats()

    def metrics(self) -> Metrics:
        """See `Engine.metrics`.

        ``rollout/prefix_cache_hit_fraction`` is the share of prompt tokens found in the cache; for
        ``publish/logprob_difference`` see `check_parity`.
        """
        return self.policy.stats.metrics() | self._parity

    def _refuse_broken(self) -> None:
        """Refuse a policy or critic that does not work, on the tokens of one question.

        Raises:
            NotFiniteError: What it computes is not finite.
        """
        ids = self.chat.open([{"role": "user", "content": QUESTION}])[0][: self.policy.max_length]
        scored = len(ids) - 1
        sample = Sample(
            ids,
            (False,) + (True,) * scored,
            (0.0,) * len(ids),
            (-1,) + (0,) * scored,
            (False,) * scored + (True,),
            0,
            0,
        )
        batch = collate([sample])
        self.learner.logprobs(batch)
        if self.learner.critic is not None:
            self.learner.values(batch)

    async def save(self, folder: Path) -> dict[str, Any]:
        """See `Engine.save`."""
        learner = self.learner
        for name, weights in learner.trained_weights():
            if not bool(weights.isfinite().all()):
                raise NotFiniteError(f"the weights {name}")
        self._refuse_broken()
        save_model(self.model, self.tokenizer, folder, self._base)
        if learner.critic is not None:
            _save(learner.critic.state_dict(), folder / "critic.safetensors")
        for name, optimizer in learner.named_optimizers().items():
            _save(optimizer_tensors(optimizer), folder / f"{name}.safetensors")
        for name, masters in learner.named_masters().items():
            _save(masters.tensors(), folder / f"{name}.safetensors")
        return {"version": self.version, "reference": self._first}

    async def load(self, folder: Path, state: dict[str, Any]) -> None:
        """See `Engine.load`."""
        learner = self.learner
        saved = state["reference"]
        if saved is not None and saved != self._first:
            if learner.reference is not None:
                raise RagenError(
                    "the model that this run began with has changed, so its KL reference is lost; "
                    "restore the old weights where model.path points"
                )
            self._first = saved
        if lora.has_adapters(self.model):
            load_adapter(self.model, folder)
        else:
            _restore(self.model, _saved_weights(folder), folder)
        if learner.critic is not None:
            _restore(learner.critic, _load(folder / "critic.safetensors"), folder)
        for name, optimizer in learner.named_optimizers().items():
            restore_optimizer(optimizer, _load(folder / f"{name}.safetensors"))
        for name, masters in learner.named_masters().items():
            masters.restore(_load(folder / f"{name}.safetensors"))
        self.version = int(state["version"])
        await self._push()

    def end_late(self) -> list[Late]:
        """See `Engine.end_late`: there are no other processes."""
        return []

    async def close(self) -> None:
        """See `Engine.close`."""
        await self.policy.close()
        learner = self.learner
        for module in filter(None, (self.model, learner.critic, learner.reference)):
            nn.Module.to(module, "meta")  # frees the storage
        for optimizer in learner.named_optimizers().values():
            optimizer.state.clear()
            optimizer.param_groups.clear()
        learner.masters = learner.critic_masters = Masters(())


def check_parity(
    policy: VllmSampler | VllmServer, learner: Learner, chat: Chat, temperature: float, dtype: str
) -> Metrics:
    """Sample a short completion and score it with the learner, whose weights the policy has.

    A sampler with weights of its own may keep old ones, or load new ones wrongly, without an error:
    the run would learn from samples of another policy, corrected by importance weights that hide
    it. Both use the run's temperature and compute in `dtype`. Returns
    ``publish/logprob_difference``: max |sampled logprob − learner's|.

    Raises:
        RagenError: It exceeds `TOLERANCES`.
    """
    num_tokens = min(NUM_TOKENS, policy.max_length // 2)
    ids = chat.open([{"role": "user", "content": QUESTION}])[0][: policy.max_length - num_tokens]
    prompt = Prompt((), ids, 0, num_tokens, temperature, seed=policy.version)
    completion = policy.ask(prompt)
    assert completion.token_ids is not None and completion.logprobs is not None
    num_prompt, num_sampled = len(ids), len(completion.token_ids)
    mask = (False,) * num_prompt + (True,) * num_sampled
    sampled = Sample(
        ids + completion.token_ids,
        mask,
        (0.0,) * num_prompt + completion.logprobs,
        (-1,) * num_prompt + (0,) * num_sampled,
        (False,) * (num_prompt + num_sampled - 1) + (True,),
        0,
        0,
    )
    batch = collate([sampled])
    logprobs_BT, _ = learner.logprobs(batch)
    difference = float((logprobs_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs().max())
    if not difference <= TOLERANCES[dtype]:  # refuses NaN too
        raise RagenError(
            f"the weights did not reach the sampler: after publication {policy.version} a token's "
            f"logprob differs by {difference:.2g} from the learner's (at most "
            f"{TOLERANCES[dtype]:g} in {dtype}); make it serve the model that is trained, a server "
            "with --logprobs-mode processed_logprobs"
        )
    return {"publish/logprob_difference": largest(difference)}


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise Damaged(path, error) from error


def _saved_weights(folder: Path) -> dict[str, Tensor]:
    try:
        saved, _ = load_policy(str(folder), "cpu", "float32")
    except NotFiniteError:  # the weights are what was written
        raise
    except RagenError as error:
        raise Damaged(folder / "model.safetensors", error.__cause__ or error) from error
    return saved.state_dict()


def _restore(module: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise RagenError(f"the checkpoint {folder} is of another model: {first}") from error
