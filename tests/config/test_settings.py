"""Resolving a run's settings from its layers, and reporting mistakes in them."""

import itertools
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.config import reading as settings
from ragen.config.config import Config
from ragen.config.keys import TABLES, keys, parse_value
from ragen.config.reading import (
    changed,
    differences,
    dump,
    flatten,
    merge,
    read_config,
    with_preset,
)
from ragen.config.rules import READ_WITH, RULES
from ragen.config.sections import AdvantageConfig, LossConfig
from ragen.core.errors import RagenError

PRESETS = sorted(settings.presets())


def message(*args: object) -> str:
    with pytest.raises(RagenError) as caught:
        merge(*args)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sampler_is_a_name_or_a_url() -> None:
    for invalid in ("vlm", "127.0.0.1:8000", "local "):
        text = message(None, {"rollout.sampler": invalid})
        assert f"{invalid!r}: expected local, vllm, or the URL of a vLLM server" in text
    assert merge(None, {"rollout.sampler": "http://127.0.0.1:8000"})


def test_later_layers_override_earlier_ones(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('algorithm = "starpo-s/grpo"\n[loss]\nclip_high = 0.3\nentropy = 0.5\n')
    config = merge(recipe, {"loss.entropy": 0.25})
    assert config.recipe == "mine"
    assert config.loss.clip_low == Config().loss.clip_low  # default
    assert config.advantage.name == "grpo"  # preset
    assert config.loss.clip_high == 0.3  # recipe over preset (0.28)
    assert config.loss.entropy == 0.25  # override over recipe (0.5)


def test_recipe_overrides_a_preset_named_on_the_command_line(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('algorithm = "starpo-s/grpo"\n[loss]\nclip_high = 0.3\n')
    config = merge(recipe, {"algorithm": "starpo/ppo"})
    assert (config.advantage.name, config.filter.rule, config.loss.clip_high) == ("gae", "all", 0.3)


def test_nested_dotted_and_short_overrides_agree() -> None:
    dotted = merge(None, {"env.name": "bandit", "env.params.slip": 0.5, "model.path": "x"})
    nested = merge(None, {"env": {"name": "bandit", "params": {"slip": 0.5}}, "model": "x"})
    assert dotted == nested


def test_environment_parameters_merge_over_layers(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[env.params]\nsize = 5\nnames = "pairs"\n')
    assert merge(recipe, {"env.params.size": 4}).env.params == {"size": 4, "names": "pairs"}


def test_every_preset_is_valid_alone_and_resolves_to_itself() -> None:
    """Evaluation resolves a run's config again: keys without effect have their default values."""
    for name in PRESETS:
        config = merge(None, {"algorithm": name})
        assert config.algorithm == name
        assert differences(config) == []
        assert settings.first_comment(settings.presets()[name])
        config = merge("sokoban", {"algorithm": name})
        assert merge(None, flatten(config)) == config


def effective_values(name: str) -> dict[str, object]:
    """A preset's values, except those that have no effect."""
    config = merge(None, {"algorithm": name})
    return {
        key: value
        for key, value in flatten(config).items()
        if key not in ("algorithm", *settings.unread(config))
    }


def test_presets_differ_in_effect_and_every_key_of_one_has_an_effect() -> None:
    """As the preset is, or with the KL loss that it switches off and a user may switch on."""
    for one, other in itertools.combinations(map(effective_values, PRESETS), 2):
        assert one != other
    for name in PRESETS:
        config = merge(None, {"algorithm": name, "loss.kl": 0.1})
        assert not settings.load_preset(name).keys() & set(settings.unread(config)), name


def test_presets_hold_the_published_values() -> None:
    starpo_ppo, starpo_grpo, s_ppo, s_grpo = (
        merge(None, {"algorithm": name})
        for name in ("starpo/ppo", "starpo/grpo", "starpo-s/ppo", "starpo-s/grpo")
    )
    for vanilla in (starpo_ppo, starpo_grpo):
        assert (vanilla.filter.rule, vanilla.loss.kl, vanilla.loss.clip_high) == ("all", 0.001, 0.2)
    assert (starpo_ppo.loss.kl_kind, starpo_grpo.loss.kl_kind) == ("k1", "k3")
    for stable in (s_ppo, s_grpo):
        assert (stable.filter.rule, stable.filter.value) == ("top_k", 0.25)
        assert (stable.loss.kl, stable.loss.clip_low, stable.loss.clip_high) == (0.0, 0.2, 0.28)
    for config in (starpo_ppo, starpo_grpo, s_ppo, s_grpo):
        assert (config.rollout.num_groups, config.rollout.group_size) == (8, 16)
        assert (config.update.minibatch_episodes, config.update.epochs) == (32, 1)
        assert config.reward.format_penalty == 0.1


@pytest.mark.parametrize(
    ("name", "advantage", "aggregation", "clip_high", "kl", "updates"),
    [
        ("grpo", "grpo", "episode_mean", 0.2, (0.04, "k3"), 1),
        ("dr-grpo", "dr_grpo", "constant", 0.2, (0.0, None), 1),
        ("dapo", "grpo", "token_mean", 0.28, (0.0, None), 16),
        ("raft", "raft", "token_mean", 0.2, (0.0, None), 1),
        ("rloo", "rloo", "constant", 0.2, (0.03, "k1"), 1),
        ("reinforce++", "reinforce_pp", "token_mean", 0.2, (0.01, "k1"), 2),
        ("gigpo", "gigpo", "token_mean", 0.2, (0.01, "k3"), 4),
        ("vine", "vine", "token_mean", 0.2, (0.0001, "k3"), 16),
    ],
)
def test_presets_of_other_papers_hold_their_values(
    name: str,
    advantage: str,
    aggregation: str,
    clip_high: float,
    kl: tuple[float, str | None],
    updates: int,
) -> None:
    config = merge(None, {"algorithm": name})
    loss, update, rollout = config.loss, config.update, config.rollout
    assert (config.advantage.name, loss.aggregation) == (advantage, aggregation)
    assert (loss.clip_low, loss.clip_high, loss.dual_clip, loss.entropy) == (0.2, clip_high, 0, 0)
    assert (loss.kl, loss.kl_kind if loss.kl else None) == kl
    episodes = rollout.num_groups * rollout.group_size * update.epochs
    assert episodes / update.minibatch_episodes == updates
    assert (rollout.refill, config.filter.include_zero) == (
        (3, False) if name == "dapo" else (0, True)
    )


def test_every_recipe_resolves_and_is_short() -> None:
    for name, file in settings.recipes().items():
        assert merge(name).recipe == name
        assert settings.first_comment(file)
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 25, name


FILLED_IN = {"recipe", "sources"}
"""Keys that RAGEN fills in when a run starts; users do not set them."""


def test_the_number_of_settings_and_rules_is_bounded() -> None:
    assert len(keys().keys() - FILLED_IN) <= 90 and len(RULES) <= 36


def test_saved_config_reads_back_equal(tmp_path: Path) -> None:
    config = merge("bandit", {"env.params.deep": {"a": [1, 2.5, "x"]}, "update.lr": 3e-4})
    (tmp_path / "config.toml").write_text(dump(config), encoding="utf-8")
    assert read_config(tmp_path / "config.toml") == config


@given(
    lr=st.floats(1e-12, 1.0, allow_nan=False),
    seed=st.integers(0, 2**62),
    name=st.text(st.characters(exclude_categories=("Cs",))),
)
def test_any_value_round_trips_through_toml(lr: float, seed: int, name: str) -> None:
    config = merge(None, {"update.lr": lr, "seed": seed, "env.params.name": name})
    assert Config.model_validate(tomllib.loads(dump(config))) == config


def test_reward_terms_merge_over_layers(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[reward.terms]\ngrounding = 0.5\nlength = 0.25\n")
    config = merge(recipe, {"reward.terms.length": 0.125})
    assert config.reward.terms == {"grounding": 0.5, "length": 0.125}
    assert ("reward.terms.length", None, 0.125) in differences(config)
    (tmp_path / "config.toml").write_text(dump(config), encoding="utf-8")
    assert read_config(tmp_path / "config.toml") == config


def test_differences_name_the_preset_value() -> None:
    config = merge(None, {"algorithm": "starpo-s/grpo", "loss.clip_high": 0.4, "seed": 3})
    assert [tuple(row) for row in differences(config)] == [
        ("seed", 0, 3),
        ("loss.clip_high", 0.28, 0.4),
    ]


MIX: dict[str, Any] = {"bandit": 1, "sokoban": 1}
MISTAKES: list[tuple[dict[str, object], str]] = [
    ({"update.lrr": 1.0}, "unknown key 'update.lrr'; did you mean 'update.lr'?"),
    ({"lr": 1.0}, "unknown key 'lr'; did you mean 'update.lr'?"),
    ({"update": {"pases": 1}}, "unknown key 'update.pases'; did you mean 'update.epochs'?"),
    ({"wrld.name": "x"}, "unknown key 'wrld.name'; did you mean 'env.name'?"),
    ({"advantage.name": "grpoo"}, "there is no such estimator; did you mean 'grpo'?"),
    ({"loss.name": "ppo_clop"}, "did you mean 'ppo_clip'?"),
    ({"filter.score": "reward_sdt"}, "there is no such filter score; did you mean"),
    ({"qqqq": 1}, "unknown key 'qqqq'; ragen help keys lists them all"),
    ({"filter": "top_k"}, "'filter' is a section: set one of filter.score, filter.rule"),
    ({"env.timeout_s": 0.0}, "env.timeout_s = 0.0: expected a number ≥ 0.001 and ≤ 86400"),
    ({"seed": -1}, "seed = -1: expected a whole number ≥ 0 and < 9223372036854775808"),
    ({"update.lr": "fast"}, 'update.lr = "fast": expected a number > 0'),
    ({"update.lr": float("nan")}, "update.lr = nan: expected a number > 0"),
    ({"update.epochs": 1.5}, "update.epochs = 1.5: expected a whole number ≥ 1"),
    ({"seed": True}, "seed = true: expected a whole number ≥ 0"),
    ({"prompt.think": 1}, "prompt.think = 1: expected true or false"),
    ({"filter.rule": "topk"}, 'filter.rule = "topk": expected all, top_k, top_p or reweight'),
    ({"env.params": 3}, "env.params = 3: expected a table; set env.params.NAME"),
    ({"env.mix": 3}, "env.mix = 3: expected"),
    ({"env.mix": {"bandit": 1}}, "a mixture has two environments or more; set env.name"),
    ({"env.mix.bandit": 0, "env.mix.sokoban": 1}, "expected a number > 0"),
    ({"env.mix.bandit": "half"}, 'env.mix.bandit = "half": expected a number > 0'),
    (
        {"env.mix": MIX | {"bandit": {"share": 1, "max_turnss": 2}}},
        "'max_turnss'; did you mean 'max_turns'?",
    ),
    (
        {"env.mix": MIX | {"bandit": {"share": 1, "max_turns": 0}}},
        "env.mix.bandit.max_turns = 0: expected",
    ),
    ({"env.mix": MIX, "env.params.size": 3}, "put them into env.mix, as in env.mix.NAME = {share"),
    ({"env.mix": MIX, "curriculum.stages": [{}]}, "leave env.mix or the stages out"),
    ({"algorithm": "ppo"}, "unknown algorithm 'ppo'; did you mean 'starpo/ppo'?"),
    ({"algorithm": 3}, "algorithm = 3: expected the name of a preset as text"),
    ({"filter.rule": "top_k", "filter.value": 1.5}, "filter.value = 1.5: expected a share"),
    ({"filter.rule": "top_p", "filter.value": 3}, "filter.value = 3: expected a share up to 1"),
    ({"filter.rule": "top_k", "filter.value": 9}, "filter.value = 9: a step has 8 groups"),
    (
        {"guard.responses.mi_drop": "stop", "diagnose.information_every": 0},
        "guard.responses.mi_drop compares measures of thoughts: set diagnose.information_every",
    ),
    ({"filter.include_zero": False, "rollout.group_size": 1}, "rollout.group_size to 2 or more"),
    ({"prompt.summary": "learned", "prompt.window": 2}, "prompt.window = 2 leaves turns out"),
    ({"rollout.refill": 1}, "set filter.include_zero = false"),
    ({"rollout.levels": 8, "rollout.refill": 1, "filter.include_zero": False}, "set one of them"),
    ({"rollout.refill": 4}, "rollout.refill = 4: expected a whole number ≥ 0 and ≤ 3"),
    (
        {"engine.name": "ray", "engine.tensor_parallel": 2},
        'engine.tensor_parallel = 2 needs rollout.sampler = "vllm"',
    ),
    ({"engine.samplers": 2}, 'beside this one: set engine.name = "ray"'),
    ({"loss.name": "gspo"}, "set loss.clip_low = 3e-4 and loss.clip_high = 4e-4"),
    ({"loss.dual_clip": 0.5}, "loss.dual_clip = 0.5: expected a bound above 1, or 0 for none"),
    ({"reward.terms.grounded": 0.1}, "no such reward term; did you mean 'grounding'?"),
    ({"reward.terms": {"xyz": 1}}, "no such reward term; expected grounding, "),
    ({"reward.terms.length": -1}, "reward.terms.length = -1: expected a number ≥ 0"),
    ({"reward.terms.length": True}, "reward.terms.length = true: expected a number ≥ 0"),
    (
        {"reward.terms.length": 1, "prompt.think": False},
        "are about thoughts: set prompt.think = true",
    ),
    ({"loss.name": "nll"}, 'loss.name = "nll" learns from demonstrations'),
    ({"advantage.name": "grpo", "rollout.group_size": 1}, "set rollout.group_size to 2 or more"),
    ({"advantage.name": "grpo"}, 'use "k3" or "k2", or loss.kl = 0'),
    ({"advantage.name": "gigpo", "loss.kl": 0.1}, "divides by a std of rewards"),
    ({"advantage.name": "bi_level_gae"}, 'set reward.placement to "turn"'),
    ({"advantage.name": "vine", "loss.kl": 0.0}, 'set reward.placement to "turn"'),
    (
        {"reward.normalise": "mean", "rollout.group_size": 1, "filter.rule": "all"},
        'reward.over = "group" compares the episodes of a group: set rollout.group_size to 2',
    ),
]


def test_mistake_gives_one_line_with_the_remedy() -> None:
    for overrides, words in MISTAKES:
        assert words in message(None, overrides), overrides


GROUP_RELATIVE = {"grpo", "act_focus", "dr_grpo", "rloo", "reinforce_pp_baseline", "gigpo"}


@pytest.mark.parametrize(
    ("normalise", "over", "refused"),
    [
        *[(method, "group", GROUP_RELATIVE) for method in ("mean", "mean_std", "asym_clip")],
        ("mean", "batch", GROUP_RELATIVE | {"reinforce_pp"}),
        ("mean_std", "batch", GROUP_RELATIVE - {"dr_grpo", "rloo"} | {"reinforce_pp"}),
        ("asym_clip", "batch", set()),
        ("identity", "group", set()),
    ],
)
def test_rewards_are_not_normalised_twice(normalise: str, over: str, refused: set[str]) -> None:
    for name in get_args(AdvantageConfig.model_fields["name"].annotation):
        values = {
            "advantage.name": name,
            "reward.normalise": normalise,
            "reward.over": over,
            "reward.placement": "turn" if name in ("bi_level_gae", "vine") else "episode",
            "loss.kl": 0.0,
        }
        if name in refused:
            assert 'set reward.normalise to "identity"' in message(None, values)
        else:
            assert merge(None, values).reward.over == over


UNREAD = {  # for each key, a value other than the default and settings that leave it unread
    "prompt.history_thoughts": ("drop", {"prompt.window": 1}),
    "model.critic": ("shared", {"algorithm": "starpo/grpo"}),
    "lora.alpha": (8, {}),
    "lora.targets": ("q_proj", {}),
    "rollout.gpu_memory": (0.3, {}),
    "reward.placement": ("turn", {"algorithm": "starpo/grpo"}),
    "reward.over": ("batch", {"algorithm": "starpo/grpo"}),
    "judge.url": ("http://127.0.0.1:1/v1", {}),
    "judge.model": ("some/model", {}),
    "judge.rubric": ("Be right.", {}),
    "filter.score": ("variance", {"algorithm": "starpo/grpo"}),
    "filter.value": (0.5, {"algorithm": "starpo/grpo"}),
    "env.max_turns": (3, {"env.mix": MIX}),
    "env.actions_per_turn": (3, {"env.mix": MIX}),
    "env.max_actions": (3, {"env.mix": MIX}),
    "curriculum.success": (0.5, {}),
    "advantage.gamma": (0.9, {"algorithm": "starpo/grpo"}),
    "advantage.gae_lambda": (0.9, {"algorithm": "starpo/grpo"}),
    "advantage.continuations": (8, {"algorithm": "gigpo"}),
    "loss.dual_clip": (2.0, {"loss.name": "cispo"}),
    "loss.kl_kind": ("k2", {"loss.kl": 0.0}),
    "update.critic_lr": (0.1, {"algorithm": "starpo/grpo"}),
    "eval.every": (5, {"eval.episodes": 0}),
    "eval.temperature": (0.5, {"eval.episodes": 0}),
    "diagnose.information_every": (1, {"prompt.think": False}),
    "prompt.window": (2, {"env.name": "agent:true"}),
    "prompt.summary": ("actions", {"env.name": "agent:true"}),
    "guard.remedy": ("kl", {}),
}
JUDGED = {
    **{"reward.terms.judge": 1.0, "judge.url": "http://127.0.0.1:2/v1", "judge.model": "model"},
    "judge.rubric": "Be brief.",
}
RAY: dict[str, Any] = {"engine.name": "ray"}
READ: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("judge.url", "judge.model", "judge.rubric"), JUDGED),
    **dict.fromkeys(("engine.learners", "engine.samplers", "engine.max_staleness"), RAY),
    "curriculum.success": {"curriculum.stages": [{}]},
    "lora.alpha": {"lora.rank": 8},
    "lora.targets": {"lora.rank": 8},
    "rollout.gpu_memory": {"rollout.sampler": "vllm"},
    "rollout.refill": {"filter.include_zero": False},
    "reward.over": {"reward.normalise": "mean", "advantage.name": "gae"},
    "advantage.name": {"loss.kl": 0.0},
    "advantage.continuations": {"algorithm": "vine"},
    "filter.score": {"filter.rule": "top_k"},
    "filter.value": {"filter.rule": "top_k"},
    "guard.remedy": {"guard.responses.mi_drop": "rollback"},
    "engine.tensor_parallel": {"rollout.sampler": "vllm"},
}
"""The settings that make the default algorithm read a key, or accept another value of it."""
OTHERS: dict[str, Any] = {
    **{"env.name": "bandit", "model.path": "elsewhere", "rollout.sampler": "vllm"},
    **{"advantage.name": "grpo", "loss.name": "cispo", "record.trackers": "wandb"},
    **{"recipe": "mine", "algorithm": "starpo/grpo", "curriculum.stages": [{}]},
    **{"prompt.tool_parser": "hermes"},
}
"""Values other than the default, of keys whose default does not suggest one."""


def other_value(key: str) -> Any:
    """A valid value of a key that is not its default."""
    field = keys()[key]
    if key in OTHERS:
        return OTHERS[key]
    if key in UNREAD:
        return UNREAD[key][0]
    if get_origin(field.annotation) is Literal:
        return next(each for each in get_args(field.annotation) if each != field.default)
    if isinstance(field.default, bool):
        return not field.default
    return field.default + 1 if isinstance(field.default, int) else field.default / 2


def test_every_key_changes_the_settings_and_refuses_a_table() -> None:
    nothings: list[Any] = [{}, {"x": {}}, [], None]
    for number, key in enumerate(key for key in keys() if key not in TABLES):
        given, value = READ.get(key, {}), other_value(key)
        before, after = merge(None, given), merge(None, {**given, key: value})
        assert flatten(after)[key] == value != flatten(before)[key]
        nothing = nothings[number % 4]
        if nothing != keys()[key].default:
            assert key in message(None, {**given, key: nothing})


def test_every_conditional_key_has_a_case() -> None:
    assert UNREAD.keys() == READ_WITH.keys() <= keys().keys()


def test_value_without_effect_is_refused() -> None:
    for key, (value, setting) in UNREAD.items():
        words = f"has no effect: it takes {READ_WITH[key].words}"
        assert words in message(None, {key: value, **setting})
        assert key not in settings.unread(merge(None, {key: value, **READ.get(key, {})}))
        standard = flatten(merge(None, setting))[key]
        assert merge(None, {key: standard, **setting}), "the default value is accepted"


def test_recipe_values_without_effect_are_dropped_under_another_algorithm(tmp_path: Path) -> None:
    """A recipe's values for its own algorithm are dropped under another from the command line."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text('algorithm = "starpo-s/grpo"\n[filter]\nvalue = 0.5\n')
    assert merge(recipe).filter.value == 0.5
    other = merge(recipe, {"algorithm": "starpo/grpo"})
    assert (other.filter.rule, other.filter.value) == ("all", 0.25)
    assert "filter.value" not in [row.key for row in differences(other)]
    recipe.write_text("[filter]\nvalue = 0.5\n")
    for more in ({}, {"seed": 3}, {"algorithm": "starpo/grpo"}):
        assert message(recipe, more) == (
            'filter.value = 0.5 in recipe mine has no effect: it takes filter.rule = "top_k" or '
            '"top_p"; leave it out or set that'
        )


def test_unknown_recipe_suggests_the_nearest() -> None:
    assert "unknown recipe 'banditt'; did you mean 'bandit'?" in message("banditt")


def test_mistake_in_a_recipe_names_the_file(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[update]\nlrr = 1.0\n")
    assert message(recipe).startswith(f"unknown key 'update.lrr' in recipe {recipe}; did you mean")
    recipe.write_text("[update]\nlr = -1.0\n")
    assert message(recipe) == "update.lr = -1.0 in recipe mine: expected a number > 0 and ≤ 1"
    recipe.write_text("[update\nlr = 1\n")
    assert "is not valid TOML" in message(recipe)
    recipe.write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in message(recipe)
    assert "no such file" in message(tmp_path / "none.toml")
    assert "is a directory" in message(tmp_path)


def test_value_that_toml_cannot_represent_is_refused() -> None:
    with pytest.raises(RagenError, match="cannot be saved"):
        dump(merge(None, {"env.params.x": {1, 2}}))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("steps", "20", 20),
        ("update.lr", "3e-4", 3e-4),
        ("prompt.think", "false", False),
        ("model.path", "123", "123"),
        ("filter.rule", "all", "all"),
        ("env.params.size", "4", 4),
        ("env.params.slip", ".5", 0.5),
        ("env.params.names", "pairs", "pairs"),
        ("env.params.sizes", "[4, 5]", [4, 5]),
        ("env.params.trick", "1\nother = 2", "1\nother = 2"),
        ("update.lr", "fast", "fast"),
    ],
)
def test_command_line_values_are_parsed(key: str, text: str, value: object) -> None:
    parsed = parse_value(key, text)
    assert parsed == value and type(parsed) is type(value)


def test_gspo_and_cispo_hold_the_published_values() -> None:
    gspo, cispo = (merge(None, {"algorithm": name}) for name in ("gspo", "cispo"))
    assert (gspo.loss.name, gspo.loss.clip_low, gspo.loss.clip_high) == ("gspo", 3e-4, 4e-4)
    assert (cispo.loss.name, cispo.loss.clip_low, cispo.rollout.refill) == ("cispo", 1.0, 3)
    for config, updates in ((gspo, 4), (cispo, 16)):
        assert (config.advantage.name, config.loss.kl, config.loss.entropy) == ("grpo", 0.0, 0.0)
        episodes = config.rollout.num_groups * config.rollout.group_size
        assert episodes / config.update.minibatch_episodes == updates


def test_parameters_of_a_recipe_are_left_out_for_another_environment() -> None:
    assert "observation" in merge("frozen-lake-still").env.params
    assert merge("frozen-lake-still", {"env.name": "bandit"}).env.params == {}
    assert merge("frozen-lake-still", {"env.name": "frozen-lake-still"}) == merge(
        "frozen-lake-still"
    )


def test_config_built_in_python_applies_its_preset() -> None:
    for name in PRESETS:
        assert with_preset(Config(algorithm=name)) == merge(None, {"algorithm": name})
    custom = with_preset(Config(algorithm="dapo", loss=LossConfig(clip_high=0.4), seed=3))
    assert (custom.loss.clip_high, custom.loss.kl, custom.seed) == (0.4, 0.0, 3)
    for resolved in (merge("sokoban", {"update.lr": 0.5}), changed(Config(), {"seed": 3})):
        assert with_preset(resolved) == resolved
    with pytest.raises(RagenError, match="unknown algorithm 'dapoo'; did you mean 'dapo'"):
        with_preset(Config(algorithm="dapoo"))


def test_the_last_of_two_spellings_of_a_key_counts() -> None:
    assert merge(None, {"env": {"max_turns": 3}, "env.max_turns": 4}).env.max_turns == 4
