"""A run folder as written by the previous version: schema 3 and the keys of that time."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

# ruff: noqa: E501
SCHEMA_3 = """
CREATE TABLE metrics (
    attempt INTEGER NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL, value REAL,
    PRIMARY KEY (attempt, step, name)
) WITHOUT ROWID;
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER NOT NULL, phase TEXT NOT NULL,
    "group" INTEGER NOT NULL, member INTEGER NOT NULL, kept INTEGER NOT NULL,
    world TEXT NOT NULL, level_seed INTEGER NOT NULL, noise_seed INTEGER NOT NULL,
    stop_reason TEXT NOT NULL, terminated INTEGER NOT NULL, truncated INTEGER NOT NULL,
    bootstrap INTEGER NOT NULL, success INTEGER NOT NULL,
    reward REAL NOT NULL, penalty REAL NOT NULL, num_turns INTEGER NOT NULL,
    num_tokens INTEGER, thought_tokens INTEGER, entropy REAL, group_score REAL,
    error TEXT, final_observation TEXT, final_picture TEXT
);
CREATE INDEX episodes_by_step ON episodes (attempt, step, phase, "group");
CREATE INDEX episodes_for_lists ON episodes (phase, world, stop_reason, step, attempt, success, kept, reward, num_turns, num_tokens, entropy, group_score, "group", level_seed);
CREATE TABLE turns (
    id INTEGER PRIMARY KEY, episode_id INTEGER NOT NULL, turn INTEGER NOT NULL,
    observation TEXT NOT NULL, picture TEXT, reply TEXT NOT NULL, thought TEXT,
    actions_asked TEXT NOT NULL, actions_executed TEXT NOT NULL,
    reward REAL NOT NULL, penalty REAL NOT NULL, well_formed INTEGER NOT NULL,
    num_tokens INTEGER, finish_reason TEXT NOT NULL, policy_version INTEGER NOT NULL,
    state_key TEXT NOT NULL, snapshot TEXT,
    prompt_ids BLOB, prompt_joins INTEGER, completion_ids BLOB, logprobs BLOB,
    thought_start INTEGER, thought_end INTEGER
);
CREATE INDEX turns_by_episode ON turns (episode_id);
CREATE TABLE tokens (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE VIRTUAL TABLE thoughts_fts USING fts5 (thought, content='turns', content_rowid='id');
CREATE TABLE samples (
    id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER NOT NULL,
    "group" INTEGER NOT NULL, member INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    "token_ids" BLOB, "loss_mask" BLOB, "turn_index" BLOB, "sampled_logprobs" BLOB, "old_logprobs" BLOB, "entropies" BLOB, "values" BLOB, "advantages" BLOB, "returns" BLOB, "ratios" BLOB
);
CREATE INDEX samples_by_step ON samples (attempt, step);
CREATE TABLE cross_scores (
    attempt INTEGER NOT NULL, step INTEGER NOT NULL, path TEXT NOT NULL,
    scores BLOB NOT NULL, own BLOB NOT NULL,
    num_thoughts INTEGER NOT NULL, num_prompts INTEGER NOT NULL,
    thoughts TEXT NOT NULL, prompts TEXT NOT NULL,
    PRIMARY KEY (attempt, step, path)
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, attempt INTEGER NOT NULL, step INTEGER NOT NULL,
    time REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL, data TEXT
);
CREATE TRIGGER events_are_kept BEFORE DELETE ON events
    BEGIN SELECT RAISE(ABORT, 'events are never deleted'); END;
CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY, attempt INTEGER, step INTEGER, time REAL NOT NULL,
    world TEXT, temperature REAL, episodes INTEGER, success REAL, record TEXT NOT NULL,
    key TEXT, settings TEXT
);
CREATE TABLE outcomes (
    key TEXT NOT NULL, world TEXT NOT NULL, level_seed INTEGER NOT NULL, sample INTEGER NOT NULL,
    success INTEGER NOT NULL, total_reward REAL NOT NULL, num_turns INTEGER NOT NULL,
    num_actions INTEGER NOT NULL, effective_actions INTEGER NOT NULL,
    valid_turns INTEGER NOT NULL, thought_words INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    stop_reason TEXT NOT NULL, error TEXT,
    PRIMARY KEY (key, level_seed, sample)
) WITHOUT ROWID;
PRAGMA user_version = 3;
"""

CONFIG_3 = """\
recipe = "bandit"
algorithm = "starpo-s/grpo"
seed = 0
steps = 2
budget = "steps"
threads = 0

[world]
name = "bandit"
turns = 1
actions_per_turn = 1
actions = 1
common_noise = false
timeout_s = 30.0
isolate = false

[world.params]

[prompt]
style = "compact"
think = true
prefill = true
window = 0
history_thoughts = "keep"

[model]
path = "base"
device = "auto"
dtype = "float32"
attention = "auto"
gradient_checkpointing = false
max_length = 1024
critic = "separate"

[lora]
rank = 0
alpha = 64
targets = "all-linear"

[rollout]
prompts = 16
members = 8
max_tokens = 24
min_tokens = 0
temperature = 1.0
slots = 128
refill = 0
sampler = "local"
gpu_memory = 0.4

[reward]
format_penalty = 0.1
placement = "episode"
normalise = "identity"
over = "group"

[reward.terms]

[filter]
score = "reward_std"
rule = "top_k"
value = 0.25
keep = "largest"
include_zero = true
scale = "none"
reweight = false
max_empty = 5

[advantage]
name = "grpo"
gamma = 1.0
lam = 1.0
turn_gamma = 0.95
step_weight = 1.0
whiten = true

[loss]
name = "ppo_clip"
aggregation = "token_mean"
clip_low = 0.2
clip_high = 0.28
dual_clip = 3.0
importance_cap = 2.0
entropy = 0.001
kl = 0.0
kl_kind = "k3"
value_clip = 0.5

[update]
minibatch_episodes = 32
passes = 1
lr = 0.0005
critic_lr = 1e-05
lr_end = 0.1
warmup_steps = 0
critic_warmup_steps = 0
muon_lr = 0.0
beta2 = 0.99
weight_decay = 0.01
max_grad_norm = 1.0
microbatch_tokens = 8192

[eval]
every = 1
episodes = 16
temperature = 1.0

[checkpoint]
every = 10
keep = 2

[record]
episodes_every = 1
tokens_every = 10
trackers = ""

[diagnose]
information_every = 5
thoughts = 64
gradients_every = 0

[guard]
rollbacks = 2
remedy = "lr"
stalled_s = 1800.0

[guard.responses]
grad_spike = "rollback"
"""

RECORD_3 = {"world": "bandit", "temperature": 1.0, "episodes": 16, "success": 0.5, "best": 1.0}
SETTINGS_3 = {"version": 4, "seed": 0, "world.name": "bandit", "world.turns": 1}


def make_old_run(folder: Path) -> Path:
    """Write a run folder of the previous version with one episode, an evaluation and an alarm."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG_3, encoding="utf-8")
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as connection:
        connection.executescript(SCHEMA_3)
        connection.execute("INSERT INTO metrics VALUES (0, 1, 'reward/mean', 0.25)")
        connection.execute(
            "INSERT INTO episodes VALUES (1, 0, 1, 'train', 0, 0, 1, 'bandit', 10000, 5, 'solved',"
            " 1, 0, 0, 1, 0.5, 0.0, 1, 2, 1, 0.1, 0.3, NULL, 'won', NULL)"
        )
        connection.execute(
            "INSERT INTO turns VALUES (65536, 1, 0, 'P _', NULL, 'Left', NULL, '[]', '[]', 0.5,"
            " 0.0, 1, NULL, 'stop', 0, 'k', NULL, NULL, NULL, NULL, NULL, NULL, NULL)"
        )
        connection.execute(
            "INSERT INTO evaluations VALUES (1, 0, 1, 9.0, 'bandit', 1.0, 16, 0.5, ?, NULL, ?)",
            (json.dumps(RECORD_3), json.dumps(SETTINGS_3)),
        )
        alarm = {"detector": "grad_spike", "step": 1, "onset": 1, "value": 9.0, "baseline": 1.0}
        connection.execute(
            "INSERT INTO events VALUES (1, 0, 1, 9.0, 'alarm', 'a spike', ?)", (json.dumps(alarm),)
        )
        connection.execute(
            "INSERT INTO events VALUES (2, 0, 1, 9.0, 'guard', 'stopped: a spike', NULL)"
        )
    return folder
