"""The sections of a config: every key with its type, its bounds, its default and its help.

A section is small and frozen, and is read by one part of the program, which receives the values
that it needs and never the whole config. `rules` holds what sections demand of each other, and
`config` puts the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ragen.config.kinds import ESTIMATOR, LOSS, SCORE

TRACKERS = ("tensorboard", "wandb", "trackio")
"""What `RecordConfig.trackers` may name; `trackers.TRACKERS` defines them."""

Response = Literal["off", "log", "stop", "rollback"]

RESPONSES: Mapping[str, Response] = MappingProxyType(
    {
        "reward_std_cliff": "log",
        "entropy_cliff": "log",
        "entropy_blowup": "log",
        "grad_spike": "log",
        "reward_drop": "log",
        "mi_drop": "log",
        "format_loss": "log",
        "degenerate_text": "stop",
        "non_finite": "log",
        "empty_filter": "stop",
        "stalled": "stop",
    }
)
"""What the guard does unless told otherwise: only where nothing more can be learnt, a run stops."""


class Section(BaseModel):
    """A group of keys; frozen, and strict about names and types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # The sentence under a key is its help on the command line.
    )


class EnvConfig(Section):
    """The environment that is played, and the budgets of an episode."""

    name: str = "frozen-lake-still"
    """A registered environment (`ragen envs`), or path/to/file.py:Class."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the environment itself, such as slip or observation."""
    max_turns: int = Field(5, ge=1)
    """Turns an episode may take."""
    actions_per_turn: int = Field(5, ge=1)
    """Actions carried out of one answer at most."""
    max_actions: int = Field(10, ge=1)
    """Actions an episode may take in all."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds that one call of the environment may take before its episode fails."""
    isolate: bool = False
    """Run each environment in a worker process, so that one that hangs can be stopped."""


class PromptConfig(Section):
    """How the agent is spoken to."""

    style: Literal["compact", "paper"] = "compact"
    """Compact for the embedded model, the papers' wording for real ones."""
    think: bool = True
    """Ask for a thought before the answer."""
    prefill: bool = True
    """Begin the reply with <think> (or <answer>) for the policy; never sampled, never trained."""
    window: int = Field(0, ge=0)
    """Turns that a prompt shows, the present one among them: 1 shows it alone, 0 all of them."""
    history_thoughts: Literal["keep", "drop"] = "keep"
    """Whether the thoughts of earlier turns stay in the prompt; dropped, each turn is a sample."""


class ModelConfig(Section):
    """The policy's weights and where they run."""

    path: str = "base"
    """base (the embedded model), a Hugging Face id, a local folder, or a run folder."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in; what is trained is kept in float32 either way."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them: a third more time, far less memory."""
    max_length: int = Field(1024, ge=16)
    """Tokens that a prompt and its completion may have together."""
    critic: Literal["separate", "shared"] = "separate"
    """Whether the critic has a backbone of its own or reads the policy's; gae needs a critic."""


class LoraConfig(Section):
    """Low-rank adapters on a frozen base (arXiv:2106.09685) instead of training all weights."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains all weights."""
    alpha: int = Field(64, ge=1)
    """An adapter counts alpha / rank times."""
    targets: str = "all-linear"
    """Layers that get one: all-linear, or names such as q_proj,v_proj."""


class RolloutConfig(Section):
    """How the experience of one step is collected."""

    num_groups: int = Field(8, ge=1)
    """Groups (prompts) in a step: P."""
    group_size: int = Field(16, ge=1)
    """Episodes in a group: G."""
    max_tokens: int = Field(80, ge=1)
    """Tokens of one completion at most."""
    temperature: float = Field(1.0, gt=0)
    slots: int = Field(64, ge=1)
    """Episodes that are sampled at once."""
    refill: int = Field(0, ge=0, le=3)
    """Rounds in which groups without spread of reward are replaced by groups on new levels."""
    sampler: str = "local"
    """What samples: local (the learner's own weights), vllm, or the URL of a vLLM server."""
    gpu_memory: float = Field(0.4, gt=0, lt=1)
    """Share of the GPU's memory that vLLM takes, awake, beside the learner."""


class RewardConfig(Section):
    """From the environment's rewards to what the optimiser sees."""

    format_penalty: float = Field(0.1, ge=0)
    """Subtracted once for each turn whose reply is invalid."""
    placement: Literal["episode", "turn"] = "episode"
    """The episode's sum at its last sampled token, or each turn's reward at its own end."""
    normalise: Literal["identity", "mean", "mean_std", "asym_clip"] = "identity"
    """Episode totals as they are, less their mean, also over their std, also cut to -1 … 3."""
    over: Literal["group", "batch"] = "group"
    """Whose episodes share the mean and std of reward.normalise."""
    terms: dict[str, Any] = Field(default_factory=dict)
    """What a fault of the thought costs in a turn at most: grounding, consistency, length or
    repetition, each a weight ≥ 0, such as grounding = 0.1."""


class FilterConfig(Section):
    """Which groups are worth learning from (StarPO-S keeps the uncertain ones)."""

    score: Annotated[str, SCORE] = "reward_std"
    """What groups are ranked by: the std of their rewards, or its square (variance)."""
    rule: Literal["all", "top_k", "top_p", "reweight"] = "all"
    """Which groups of the ranking are kept; reweight keeps all, each weighted by its reward std as
    a share of the largest."""
    value: float = Field(0.25, gt=0)
    """top_k: share of the groups, or from 2 on their number; top_p: share of the summed score."""
    include_zero: bool = True
    """Whether groups without any spread of reward may be kept."""


class AdvantageConfig(Section):
    """Credit: which estimator turns rewards into advantages."""

    name: Annotated[str, ESTIMATOR] = "gae"
    """The estimator."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount a token, of gae and reinforce_pp."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of gae and bi_level_gae: 1 trusts the rewards, 0 the critic."""
    turn_gamma: float = Field(0.95, ge=0, le=1)
    """Discount a turn, of bi_level_gae and gigpo."""


class LossConfig(Section):
    """What is minimised."""

    name: Annotated[str, LOSS] = "ppo_clip"
    """Clipped by token (ppo_clip) or by episode (gspo), a clipped weight (cispo); nll imitates."""
    aggregation: Literal["token_mean", "episode_mean", "constant"] = "token_mean"
    """Tokens count alike, episodes count alike, or each token as one of the longest episode's."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """How far below 1 the importance ratio may count; for gspo about 3e-4."""
    clip_high: float = Field(0.2, ge=0)
    """How far above 1 the importance ratio may count; for gspo about 4e-4."""
    dual_clip: float = Field(3.0, ge=0)
    """Bound on the loss of negative advantages, times |advantage|; above 1, or 0 for none."""
    entropy: float = Field(0.001, ge=0)
    kl: float = Field(0.001, ge=0)
    """Weight of the KL divergence to the reference (the policy the run began with)."""
    kl_kind: Literal["k1", "k2", "k3"] = "k1"
    """How it is estimated: k1 acts in the reward, k2 and k3 act in the loss."""


class UpdateConfig(Section):
    """The optimiser and how often it steps on one collection."""

    minibatch_episodes: int = Field(32, ge=1)
    epochs: int = Field(1, ge=1)
    lr: float = Field(1e-6, gt=0)
    critic_lr: float = Field(1e-5, gt=0)
    lr_end: float = Field(1.0, ge=0, le=1)
    """Share of the learning rate towards which it falls, in a line over the run."""
    warmup_steps: int = Field(0, ge=0)
    beta2: float = Field(0.999, gt=0, lt=1)
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
    """Newest checkpoints that stay, in addition to the best."""


class RecordConfig(Section):
    """What the run database keeps."""

    episodes_every: int = Field(1, ge=0)
    """Steps between recorded episodes (texts, rewards, states); 0 records none."""
    tokens_every: int = Field(10, ge=0)
    """Steps between recorded samples (ids, masks, logprobs, advantages); 0 records none."""
    trackers: str = ""
    """Trackers that get the metrics, too: names among tensorboard, wandb and trackio, or none."""


class DiagnoseConfig(Section):
    """Measures that cost more than a signal, each on a schedule of its own."""

    information_every: int = Field(5, ge=0)
    """Steps between measures of what thoughts tell of their prompts; 0 measures never."""
    gradients_every: int = Field(0, ge=0)
    """Steps between gradient norms by reward std; 0 takes none."""


class GuardConfig(Section):
    """What is done about a run that gets into trouble."""

    responses: dict[str, Any] = Field(default_factory=dict)
    """A detector's response, off, log, stop or rollback, such as reward_drop = "rollback"."""
    remedy: Literal["lr", "filter", "kl", "seeds"] = "lr"
    """What a rollback changes: a third of the learning rate, a tighter filter, more KL, or other
    random numbers."""

    def response(self, detector: str) -> Response:
        """What is done when `detector` fires."""
        chosen: Response = self.responses.get(detector) or RESPONSES[detector]
        return chosen


class Sections(Section):
    """All sections of one training run; a `Config` is one whose values go together."""

    recipe: str = "custom"
    """Name of the recipe that this run came from."""
    algorithm: str = "starpo/ppo"
    """Preset that the algorithm's settings start from."""
    seed: int = Field(0, ge=0)
    steps: int = Field(200, ge=0)
    """Length of the run, in what budget says."""
    budget: Literal["steps", "updates"] = "steps"
    """What steps, warm-ups and the fall of the learning rate count: collections or updates."""
    threads: int = Field(0, ge=0)
    """CPU threads of the learner and the sampler; 0 probes this machine once."""
    env: EnvConfig = EnvConfig()
    prompt: PromptConfig = PromptConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
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
    guard: GuardConfig = GuardConfig()
    sources: dict[str, str] = Field(default_factory=dict)
    """Hash or version of each function from outside; RAGEN fills it in when a run begins."""

    @property
    def one_arithmetic(self) -> bool:
        """Whether sampler and learner compute alike: then sampled logprobs are the old ones."""
        return self.model.dtype == "float32" and self.rollout.sampler == "local"
