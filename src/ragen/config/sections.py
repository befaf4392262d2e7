"""The sections of a config: every key with its type, its bounds, its default and its help.

A section is small and frozen. One part of the program reads it and receives the values that it
needs, never the whole config.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from ragen.config.extensions import (
    DETECTOR,
    ESTIMATOR,
    LOSS,
    SCORE,
    TERM,
    TOOL_PARSER,
    short_name,
)
from ragen.core.errors import nearest

TRACKERS = ("tensorboard", "wandb")
"""The names that `RecordConfig.trackers` accepts; `trackers.TRACKERS` defines them."""

Response = Literal["off", "log", "stop", "rollback"]

RESPONSES: Mapping[str, Response] = MappingProxyType(
    {
        name: "stop" if name in ("degenerate_text", "empty_filter", "stalled") else "log"
        for name in DETECTOR.names
    }
)
"""Default responses of the guard. They stop a run only if it can learn nothing more."""


LONGEST_TEXT = 4096
"""Characters of a text: the longest path of most systems."""
MOST_EPISODES = 2**20
"""Episodes of one step."""
MOST_STEPS = 10_000_000
"""Steps of a run."""
MOST_TOKENS = 10_000_000
"""Tokens of a context."""

Steps = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Turns = Annotated[int, Field(ge=1, le=10_000)]
Actions = Annotated[int, Field(ge=1, le=100_000)]
Rate = Annotated[float, Field(gt=0, le=1)]
Weight = Annotated[float, Field(ge=0, le=1e6)]


class Section(BaseModel):
    """A group of keys; frozen, and strict about names and types.

    Every number is bounded where a larger one makes no sense, so that none overflows a counter or
    asks for a step without an end.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # The sentence under a key is its help on the command line.
    )

    @field_validator("*")
    @classmethod
    def _can_be_saved(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse text that no file or terminal takes, and tables that cannot be written."""
        if isinstance(value, str):
            check_text(value)
        elif isinstance(value, list):
            check_entry(str(info.field_name), value)
        elif isinstance(value, dict):
            for name, entry in value.items():
                check_text(name)
                check_entry(name, entry)
        return value


def most_turns(env: EnvConfig) -> int:
    """Turns of the longest episode, of any environment of a mixture."""
    return max((each.max_turns for each in env.mix.values()), default=env.max_turns)


def is_share(value: Any) -> bool:
    """True if the entry of a mixture is a share alone."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_text(text: str) -> None:
    """Refuse text that cannot be a name or a path."""
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"expected at most {LONGEST_TEXT} characters, not {len(text)}")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise ValueError("expected text without control characters, in UTF-8")


def check_entry(name: str, entry: Any) -> None:
    """Refuse an entry of a table that cannot be saved with a run."""
    try:
        json.dumps(entry, allow_nan=False, ensure_ascii=False, default=str).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is or holds a value that cannot be saved: {error}") from None


class MixedEnv(Section):
    """One environment of a mixture: its weight among the others, parameters and budgets."""

    share: float = Field(gt=0, le=1e6)
    params: dict[str, Any] = {}
    max_turns: Turns = 5
    actions_per_turn: Turns = 5
    max_actions: Actions = 10


class EnvConfig(Section):
    """The environment, and the budgets of an episode; or several environments."""

    name: str = "frozen-lake-still"
    """A registered environment (`ragen envs`), LIBRARY:NAME, or path/to/file.py:Class."""
    params: dict[str, Any] = {}
    """Parameters of the environment, such as observation."""
    max_turns: Turns = 5
    """Maximum number of turns in an episode."""
    actions_per_turn: Turns = 5
    """Maximum number of actions that are executed from one answer."""
    max_actions: Actions = 10
    """Maximum number of actions in an episode."""
    mix: dict[str, MixedEnv] = {}
    """Several environments in the place of name: a share of each, as in sokoban = 0.5, or a table
    with the share and the environment's own params and budgets."""
    timeout_s: float = Field(30.0, ge=0.001, le=86_400)
    """Seconds after which a call of the environment fails its episode."""
    isolate: bool = False
    """Run each environment in a worker process, which can be stopped if it hangs."""

    @model_validator(mode="before")
    @classmethod
    def _name_of_mixture(cls, values: Any) -> Any:
        mix = values.get("mix") if isinstance(values, dict) else None
        if not isinstance(mix, dict) or not mix:
            return values
        joined = "+".join(short_name(str(name)) for name in mix)
        if values.get("name", joined) != joined:
            raise ValueError("env.name and env.mix are given: name one environment, or a mixture")
        return values | {"name": joined}

    @field_validator("mix", mode="before")
    @classmethod
    def _with_shares(cls, mix: Any) -> Any:
        if not isinstance(mix, dict):
            return mix
        for name, entry in mix.items():
            known = MixedEnv.model_fields
            for key in entry if isinstance(entry, dict) else ():
                if key not in known:
                    raise ValueError(f"{name} has no key {key!r}{nearest(str(key), known)}")
        return {k: {"share": v} if is_share(v) else v for k, v in mix.items()}


class CurriculumConfig(Section):
    """Training on levels that become harder as success grows; evaluations have the full task."""

    stages: list[dict[str, Any]] = []
    """Parameters and budgets of the environment in each stage, such as [{max_distance = 1,
    max_turns = 1}]. After the last stage comes the full task."""
    success: float = Field(0.7, gt=0, le=1)
    """Success in training, over five steps, from which on the next stage begins."""


class PromptConfig(Section):
    """How the agent is prompted."""

    style: Literal["compact", "paper"] = "compact"
    """Format of prompts: compact for the embedded models, the papers' wording for others."""
    think: bool = True
    """Ask for a thought before the answer."""
    prefill: bool = True
    """Put <think> (or <answer>) at the start of the reply; it is neither sampled nor trained."""
    window: int = Field(0, ge=0, le=10_000)
    """Number of turns in a prompt, including the current one: 1 shows it alone, 0 shows all."""
    summary: Literal["none", "actions", "observations", "learned"] = "none"
    """Summary of the turns that a prompt does not show: a line each with its actions and reward,
    or also the start of what followed, below the first observation. learned: the agent is asked
    for one when its context is nearly full."""
    history_thoughts: Literal["keep", "drop"] = "keep"
    """Keep or drop the thoughts of earlier turns in prompts; with drop, each turn is a sample."""
    tool_parser: Annotated[str, TOOL_PARSER] = "auto"
    """How calls of tools are read: auto (the chat template's form), hermes, llama3, mistral, or
    path/to/file.py:name."""


class ModelConfig(Section):
    """The policy's weights and how they are computed with."""

    path: str = "base"
    """base (the embedded model), a Hugging Face id, a local folder, or a run folder."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation; trained weights are kept in float32 in both cases."""
    gradient_checkpointing: bool = False
    """Recompute activations instead of keeping them: a third more time, far less memory."""
    max_length: int = Field(1024, ge=16, le=MOST_TOKENS)
    """Maximum number of tokens of a prompt and its completion together."""
    critic: Literal["separate", "shared"] = "separate"
    """The critic has its own backbone, or shares the policy's; gae needs a critic."""
    train_vision: bool = True
    """Train vision tower and projector of a model that reads pictures, too; LoRA never does."""


class LoraConfig(Section):
    """Low-rank adapters on a frozen base (arXiv:2106.09685) instead of training all weights."""

    rank: int = Field(0, ge=0, le=65_536)
    """Rank of the adapters; 0 trains all weights."""
    alpha: int = Field(64, ge=1, le=1_000_000)
    """Scale of the adapters: each is multiplied by alpha / rank."""
    targets: str = "all-linear"
    """Layers with an adapter: all-linear, or names such as q_proj,v_proj."""


class RolloutConfig(Section):
    """How the episodes of one step are collected."""

    num_groups: int = Field(8, ge=1, le=MOST_EPISODES)
    """Groups (prompts) per step: P."""
    group_size: int = Field(16, ge=1, le=MOST_EPISODES)
    """Episodes per group: G."""
    levels: int = Field(0, ge=0, le=MOST_EPISODES)
    """Number of levels that training takes turns on; 0 plays none twice."""
    max_tokens: int = Field(80, ge=1, le=MOST_TOKENS)
    """Maximum number of tokens of one completion."""
    temperature: float = Field(1.0, ge=0.001, le=100)
    """Sampling temperature."""
    slots: int = Field(64, ge=1, le=65_536)
    """Episodes that a sampler samples at the same time."""
    refill: int = Field(0, ge=0, le=3)
    """Rounds that replace groups of equal rewards by groups on new levels."""
    sampler: str = "local"
    """The sampler: local (reads the learner's weights), vllm, or the URL of a vLLM server."""
    gpu_memory: float = Field(0.4, gt=0, lt=1)
    """Share of the GPU's memory that vLLM takes while it samples."""


class RewardConfig(Section):
    """How the environment's rewards become training rewards."""

    format_penalty: Weight = 0.1
    """Subtracted once for each turn whose reply is invalid."""
    placement: Literal["episode", "turn"] = "episode"
    """Put the sum at the episode's last token, or each turn's reward at the turn's last token."""
    normalise: Literal["identity", "mean", "mean_std", "asym_clip"] = "identity"
    """Episode totals: unchanged, minus their mean, also divided by their std, also clipped to
    [-1, 3]."""
    over: Literal["group", "env", "batch"] = "group"
    """The episodes over which reward.normalise takes its mean and std: of one group, of one
    environment, or all."""
    terms: dict[Annotated[str, TERM], Weight] = {}
    """Reward terms and their weights. Grounding, consistency, observation, prediction, length and
    repetition have the highest cost of a fault in one turn, such as grounding = 0.1; judge is the
    section judge."""


class JudgeConfig(Section):
    """The language model that judges episodes, for the reward term judge."""

    url: str = ""
    """An OpenAI-compatible endpoint, such as http://localhost:8000/v1. Its key is in
    RAGEN_JUDGE_KEY. If empty, the model runs in the process of the run."""
    model: str = ""
    """The model's name at that endpoint; without one, a folder, a run, a hub id or base."""
    rubric: str = ""
    """A good episode, in words."""


class FilterConfig(Section):
    """Which groups are trained on (StarPO-S keeps those with the highest reward std)."""

    score: Annotated[str, SCORE] = "reward_std"
    """The score that ranks groups: the std of their rewards, or its square (variance)."""
    rule: Literal["all", "top_k", "top_p", "reweight"] = "all"
    """Which groups are kept; reweight keeps all, each weighted by its reward std ÷ the largest."""
    value: float = Field(0.25, gt=0, le=MOST_EPISODES)
    """For top_k the share of groups, or above 1 their number; for top_p the share of all scores."""
    include_zero: bool = True
    """Groups of equal rewards may be kept."""


class AdvantageConfig(Section):
    """The estimator that turns rewards into advantages."""

    name: Annotated[str, ESTIMATOR] = "gae"
    """The estimator."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount: per token for gae and reinforce_pp, per turn for bi_level_gae, gigpo and vine."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of gae and bi_level_gae: 1 gives return − value, 0 the TD error."""
    continuations: int = Field(4, ge=1, le=1000)
    """Continuations from each state, whose mean return is its value for vine."""


class LossConfig(Section):
    """The loss."""

    name: Annotated[str, LOSS] = "ppo_clip"
    """The policy loss: a ratio clipped per token (ppo_clip) or per episode (gspo), or a clipped
    weight (cispo); nll is for demonstrations."""
    aggregation: Literal["token_mean", "episode_mean", "constant"] = "token_mean"
    """Equal weight per token, per episode, or per token with a constant divisor (Dr. GRPO)."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """ε₋: the importance ratio is clipped below 1 − ε₋; about 3e-4 for gspo."""
    clip_high: float = Field(0.2, ge=0, le=1000)
    """ε₊: the importance ratio is clipped above 1 + ε₊; about 4e-4 for gspo."""
    dual_clip: Weight = 3.0
    """Upper bound of the loss for negative advantages, in |advantage|: above 1, or 0 for none."""
    entropy: Weight = 0.001
    """Weight of the entropy bonus."""
    kl: Weight = 0.001
    """Weight of the KL divergence to the reference (the policy at the start of the run)."""
    kl_kind: Literal["k1", "k2", "k3"] = "k1"
    """The estimate of that KL: k1 acts in the reward, k2 and k3 act in the loss."""


class UpdateConfig(Section):
    """The optimiser, and its steps on one collection."""

    minibatch_episodes: int = Field(32, ge=1, le=MOST_EPISODES)
    """Episodes per minibatch, which is one optimiser step."""
    epochs: int = Field(1, ge=1, le=1000)
    """Epochs over one collection."""
    lr: Rate = 1e-6
    """Learning rate of the policy."""
    critic_lr: Rate = 1e-5
    """Learning rate of the critic."""
    lr_end: float = Field(1.0, ge=0, le=1)
    """Share of the learning rate that is left at the end of the run, after a linear decay."""
    warmup_steps: Steps = 0
    """Steps of the linear warm-up of the learning rate."""
    beta2: float = Field(0.999, gt=0, lt=1)
    """AdamW's β₂."""
    microbatch_tokens: int = Field(8192, ge=1, le=1_000_000_000)
    """Tokens in memory at once; a minibatch is split without a change of its result."""


class EngineConfig(Section):
    """Where a run computes: in one process, or in many on one machine or a cluster.

    Ray itself takes the address of a running cluster from the environment variable RAY_ADDRESS.
    """

    name: Literal["local", "ray"] = "local"
    """local (this machine), or ray: learners and samplers in processes of their own."""
    processes: int = Field(1, ge=0, le=64)
    """Processes of the local engine, on a CPU. Each plays its share of the groups and trains its
    share of every minibatch. 0 takes as many as there are free cores."""
    learners: int = Field(1, ge=1, le=4096)
    """Processes that train, with the weights split among them (FSDP2)."""
    samplers: int = Field(1, ge=1, le=4096)
    """Processes that sample, each with all the weights."""
    tensor_parallel: int = Field(1, ge=1, le=64)
    """GPUs among which each vLLM splits its weights, for rollout.sampler = "vllm"; without GPUs,
    processes."""
    max_staleness: int = Field(0, ge=0, le=16)
    """Number of weight updates by which an episode may be old when it is trained on. Above 0, the
    next steps are played while one trains; older episodes are dropped."""


class EvalConfig(Section):
    """Evaluation during training, on a fixed set of levels."""

    every: Steps = 0
    """Steps between evaluations; 0 evaluates before and after only."""
    episodes: int = Field(256, ge=0, le=9877)
    """Number of levels, with one episode each; 0 never evaluates."""
    temperature: float = Field(1.0, ge=0, le=100)
    """Sampling temperature of evaluations; 0 is greedy."""


class CheckpointConfig(Section):
    """When checkpoints are saved, and how many stay."""

    every: Steps = 10
    """Steps between checkpoints; 0 saves only after the last step."""
    keep: int = Field(2, ge=1, le=MOST_STEPS)
    """Number of newest checkpoints that stay, in addition to the best one."""


class RecordConfig(Section):
    """The contents of the run's database."""

    episodes_every: Steps = 1
    """Steps between recorded episodes (texts, rewards, states); 0 records none."""
    tokens_every: Steps = 10
    """Steps between recorded samples (ids, masks, logprobs, advantages); 0 records none."""
    trackers: str = ""
    """Trackers that also get the metrics: tensorboard, wandb, both, or none."""


class DiagnoseConfig(Section):
    """Schedules of the costly measurements."""

    information_every: Steps = 5
    """Steps between measurements of the MI of thoughts and prompts; 0 never measures."""
    gradients_every: Steps = 0
    """Steps between measurements of gradient norms by reward std; 0 never measures."""


class GuardConfig(Section):
    """How the guard responds to its detectors."""

    responses: dict[Annotated[str, DETECTOR], Response] = {}
    """A detector's response, off, log, stop or rollback, such as reward_drop = "rollback"."""
    remedy: Literal["lr", "filter", "kl", "seeds"] = "lr"
    """The change of a rollback: lr (a third of the learning rates), filter (fewer groups), kl (a
    larger KL weight) or seeds (other random numbers)."""

    def response(self, detector: str) -> Response:
        """The response to an alarm of `detector`."""
        return self.responses.get(detector) or RESPONSES[detector]


class Sections(Section):
    """All sections of one training run; `Config` adds the rules between them."""

    recipe: str = "custom"
    """Name of the run's recipe."""
    algorithm: str = "starpo/ppo"
    """Preset of the algorithm's settings (ragen help algorithms)."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed from which all randomness is derived."""
    steps: Steps = 200
    """Length of the run, in the unit of budget."""
    budget: Literal["steps", "updates", "tokens"] = "steps"
    """Unit of steps, warm-up and decay: collections (steps), optimiser steps (updates) or thousands
    of sampled tokens (tokens)."""
    threads: int = Field(0, ge=0, le=1024)
    """CPU threads of learner and sampler; 0 chooses the fastest number on this machine."""
    env: EnvConfig = EnvConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    prompt: PromptConfig = PromptConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    judge: JudgeConfig = JudgeConfig()
    filter: FilterConfig = FilterConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    update: UpdateConfig = UpdateConfig()
    engine: EngineConfig = EngineConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    record: RecordConfig = RecordConfig()
    diagnose: DiagnoseConfig = DiagnoseConfig()
    guard: GuardConfig = GuardConfig()
    sources: dict[str, str] = {}
    """Hash or version of each name from outside; RAGEN fills it in when a run begins."""

    @property
    def may_use_kl(self) -> bool:
        """True if the run has a KL reference, or the guard may give it one."""
        adds_kl = self.guard.remedy == "kl" and "rollback" in self.guard.responses.values()
        return self.loss.kl > 0 or adds_kl

    @property
    def local_models(self) -> dict[str, str]:
        """The names of models that run here, by key: the policy, and a judge without a server."""
        judge = {} if self.judge.url or not self.judge.model else {"judge.model": self.judge.model}
        return {"model.path": self.model.path} | judge

    @property
    def one_arithmetic(self) -> bool:
        """True if sampler and learner compute alike: then sampled logprobs are the old ones."""
        is_local = self.engine.name == "local" and self.rollout.sampler == "local"
        return is_local and self.model.dtype == "float32"
