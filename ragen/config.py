"""Every knob, one default, one place.

A run is a `Config`: small frozen sections, each read by one part of the program, which receives the
values it needs and never the tree. Values are settled in the order defaults < algorithm preset <
recipe < command line (`settings.py` reads the files); unknown keys and wrong types are refused by
name.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A group of keys; frozen, and strict about names and types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # The sentence under a key is its help on the command line.
    )


class WorldConfig(Section):
    """The world that is played, and the budgets of an episode."""

    name: str = "frozen-lake-still"
    """A registered world (`ragen envs`), or path/to/file.py:Class."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the world itself, such as slip or observation."""
    turns: int = Field(5, ge=1)
    """Turns an episode may take."""
    actions_per_turn: int = Field(5, ge=1)
    """Actions carried out of one answer at most."""
    actions: int = Field(10, ge=1)
    """Actions an episode may take in all."""
    common_noise: bool = False
    """Give all members of a group the same random events."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds that one call of the world may take before its episode fails."""
    isolate: bool = False
    """Run each world in a worker process, so that one that hangs can be stopped."""


class PromptConfig(Section):
    """How the agent is spoken to."""

    style: Literal["compact", "paper"] = "compact"
    """Compact for the embedded model, the papers' wording for real ones."""
    think: bool = True
    """Ask for a thought before the answer."""
    prefill: bool = True
    """Begin the reply with <think> (or <answer>) for the policy; never sampled, never trained."""
    context: Literal["full", "window", "single"] = "full"
    """What of its history a turn sees: all of it, the last turns, or nothing."""
    window: int = Field(3, ge=1)
    """Turns that context = "window" keeps."""


class ModelConfig(Section):
    """The policy's weights and where they run."""

    path: str = "base"
    """base (the embedded model), a Hugging Face id, a local folder, or a run folder."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_length: int = Field(1024, ge=16)
    """Tokens that a prompt and its completion may have together."""


class RolloutConfig(Section):
    """How the experience of one step is collected."""

    prompts: int = Field(8, ge=1)
    """Prompts (groups) a step: P."""
    members: int = Field(16, ge=1)
    """Episodes of one prompt: G."""
    max_tokens: int = Field(80, ge=1)
    """Tokens of one completion at most."""
    min_tokens: int = Field(0, ge=0)
    """Tokens before the end of turn may be drawn (benchmarks force a length with it)."""
    temperature: float = Field(1.0, gt=0)
    slots: int = Field(64, ge=1)
    """Episodes that are sampled at once."""


class RewardConfig(Section):
    """From the world's rewards to what the optimiser sees."""

    format_penalty: float = Field(0.1, ge=0)
    """Subtracted once for each turn whose reply is invalid."""
    placement: Literal["episode", "turn"] = "episode"
    """The episode's sum at its last sampled token, or each turn's reward at its own end."""
    normalise: Literal["identity", "mean", "mean_std", "asym_clip"] = "identity"
    """Episode totals as they are, less their mean, also over their std, also cut to -1 … 3."""
    over: Literal["group", "world", "batch"] = "group"
    """Whose episodes share the mean and std of reward.normalise."""


class FilterConfig(Section):
    """Which groups are worth learning from (StarPO-S keeps the uncertain ones)."""

    score: Literal["reward_std"] = "reward_std"
    rule: Literal["all", "top_k"] = "all"
    value: float = Field(0.25, gt=0, le=1)
    """Share of the groups that top_k keeps; at least one is kept."""
    keep: Literal["largest", "smallest"] = "largest"
    include_zero: bool = True
    """Whether groups without any spread may be kept."""
    max_empty: int = Field(5, ge=1)
    """Steps in a row without a kept group after which the run stops."""


class AdvantageConfig(Section):
    """Credit: which estimator turns rewards into advantages."""

    name: Literal[
        "gae",
        "bi_level_gae",
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gigpo",
    ] = "gae"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount a token, of gae and reinforce_pp."""
    lam: float = Field(1.0, ge=0, le=1)
    """λ of gae and bi_level_gae: 1 trusts the rewards, 0 the critic."""
    turn_gamma: float = Field(0.95, ge=0, le=1)
    """Discount a turn, of bi_level_gae and gigpo."""
    step_weight: float = Field(1.0, ge=0)
    """Weight ω of a turn's own advantage beside its episode's in gigpo."""
    whiten: bool = True
    """Give gae and bi_level_gae advantages of mean 0 and deviation 1 over the trained tokens."""


class LossConfig(Section):
    """What is minimised."""

    name: Literal["ppo_clip", "nll"] = "ppo_clip"
    aggregation: Literal["token_mean", "episode_mean"] = "token_mean"
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float = Field(3.0, gt=1)
    """Bound on the loss of negative advantages, times |advantage|."""
    entropy: float = Field(0.001, ge=0)
    kl: float = Field(0.001, ge=0)
    """Weight of the KL divergence to the reference (the policy the run began with)."""
    kl_kind: Literal["k1", "k2", "k3"] = "k1"
    kl_place: Literal["reward", "loss"] = "reward"
    value_clip: float = Field(0.5, gt=0)
    """How far a value may move from the one the advantages were computed with."""


class UpdateConfig(Section):
    """The optimiser and how often it steps on one collection."""

    minibatch_episodes: int = Field(32, ge=1)
    passes: int = Field(1, ge=1)
    lr: float = Field(1e-6, gt=0)
    critic_lr: float = Field(1e-5, gt=0)
    lr_end: float = Field(1.0, ge=0, le=1)
    """Share of the learning rate towards which it falls, in a line over the run's steps."""
    warmup_steps: int = Field(0, ge=0)
    critic_warmup_steps: int = Field(0, ge=0)
    """First steps that train the critic alone."""
    muon_lr: float = Field(0.0, ge=0)
    """Learning rate of Muon for weight matrices; 0 trains everything with AdamW."""
    beta2: float = Field(0.999, gt=0, lt=1)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    microbatch_tokens: int = Field(8192, ge=1)
    """Tokens that are in memory at once; splits a minibatch without changing its result."""


class EvalConfig(Section):
    """Evaluation during training, on a fixed set of levels."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates before and after only."""
    episodes: int = Field(256, ge=0, le=9877)
    """Levels, one episode each; 0 evaluates never."""
    temperature: float = Field(1.0, ge=0)


class CheckpointConfig(Section):
    """What is kept on disk to go on from."""

    every: int = Field(10, ge=0)
    """Steps between checkpoints; 0 saves after the last step only."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that stay, besides the best."""


class RecordConfig(Section):
    """What the run database keeps."""

    episodes_every: int = Field(1, ge=0)
    """Steps between recorded episodes (texts, rewards, states); 0 records none."""
    tokens_every: int = Field(10, ge=0)
    """Steps between recorded samples (ids, masks, logprobs, advantages); 0 records none."""


class DiagnoseConfig(Section):
    """Measures that cost more than a signal, each on a schedule of its own."""

    information_every: int = Field(5, ge=0)
    """Steps between measures of what thoughts tell of their prompts; 0 measures never."""
    thoughts: int = Field(64, ge=2)
    """Thoughts that such a measure takes at most, each scored under all their prompts."""
    gradients_every: int = Field(0, ge=0)
    """Steps between gradient norms by reward std; 0 takes none."""


class Config(Section):
    """One training run."""

    recipe: str = "custom"
    """Name of the recipe that this run came from."""
    algorithm: str = "starpo/ppo"
    """Preset that the algorithm's settings start from."""
    seed: int = Field(0, ge=0)
    steps: int = Field(200, ge=0)
    threads: int = Field(0, ge=0)
    """CPU threads of the learner and the sampler; 0 probes this machine once."""
    world: WorldConfig = WorldConfig()
    prompt: PromptConfig = PromptConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    filter: FilterConfig = FilterConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    update: UpdateConfig = UpdateConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    record: RecordConfig = RecordConfig()
    diagnose: DiagnoseConfig = DiagnoseConfig()

    @model_validator(mode="after")
    def _combination(self) -> Config:
        if self.loss.name == "nll":
            raise ValueError(
                'loss.name = "nll" learns from demonstrations (`ragen base`), not from episodes of '
                'its own; train with "ppo_clip"'
            )
        if self.loss.kl > 0 and self.loss.kl_kind == "k1" and self.loss.kl_place == "loss":
            raise ValueError(
                'loss.kl_kind = "k1" has zero expected gradient in the loss; use "k2" or "k3" '
                'there, or loss.kl_place = "reward"'
            )
        if self.loss.kl > 0 and self.loss.kl_place == "reward" and self.loss.kl_kind != "k1":
            raise ValueError('loss.kl_place = "reward" takes loss.kl_kind = "k1" only')
        compares = self.advantage.name not in ("gae", "bi_level_gae", "reinforce_pp")
        if compares and self.rollout.members < 2:
            raise ValueError(
                f'advantage.name = "{self.advantage.name}" compares the members of a group: '
                "set rollout.members to 2 or more"
            )
        if self.advantage.name == "bi_level_gae" and self.reward.placement != "turn":
            raise ValueError(
                'advantage.name = "bi_level_gae" credits turns with their own rewards: '
                'set reward.placement to "turn"'
            )
        self._normalised_once(compares)
        if self.filter.rule != "all" and self.rollout.members < 2:
            raise ValueError(
                "a filter on reward_std compares the members of a group: "
                "set rollout.members to 2 or more"
            )
        if self.rollout.min_tokens > self.rollout.max_tokens:
            raise ValueError("rollout.min_tokens must not exceed rollout.max_tokens")
        if self.rollout.max_tokens >= self.model.max_length:
            raise ValueError("rollout.max_tokens must be below model.max_length")
        return self

    def _normalised_once(self, compares: bool) -> None:
        """Refuse a normalisation that the estimator does again, or undoes."""
        name, reward = self.advantage.name, self.reward
        if reward.normalise == "identity":
            return
        if reward.over == "group" and self.rollout.members < 2:
            raise ValueError(
                'reward.over = "group" compares the members of a group: '
                "set rollout.members to 2 or more"
            )
        if reward.over == "group":
            again = compares
        elif reward.normalise == "mean":
            again = compares or name == "reinforce_pp"
        else:
            rescales = name in ("grpo", "gigpo", "reinforce_pp", "reinforce_pp_baseline")
            again = reward.normalise == "mean_std" and rescales
        if again:
            raise ValueError(
                f'advantage.name = "{name}" normalises rewards itself, so reward.normalise = '
                f'"{reward.normalise}" over the {reward.over} would be done twice or undone: '
                'set reward.normalise to "identity"'
            )
