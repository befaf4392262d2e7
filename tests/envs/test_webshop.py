"""WebShop: the catalogue, the score, pages and actions, play, and the original files."""

import itertools
import json
import re

import numpy as np
import pytest

from ragen.core.errors import RagenError
from ragen.envs.checker import check
from ragen.envs.registry import make
from ragen.envs.worlds.webshop.catalogue import (
    NO_LIMIT,
    SIMILAR,
    Goal,
    Product,
    has_attribute,
    price_limit,
    same_option,
    score,
    similarity,
    type_factor,
)
from ragen.envs.worlds.webshop.generator import DEPARTMENTS
from ragen.envs.worlds.webshop.shop import parse_action
from ragen.evaluation.baselines import Budget, compute_baselines

PHRASES = sorted({each for place in DEPARTMENTS for each in (*place.adjectives, *place.parts)})


@pytest.fixture(scope="module")
def env():
    return make("webshop")


def values(product):
    return [value for each in product.options.values() for value in each]


def play(env, *actions):
    """The last step of some actions."""
    return [env.step(action) for action in actions][-1]


def clickable(observation):
    return observation.splitlines()[-1].removeprefix("Clickable: ").split(", ")


# The catalogue


def test_no_two_phrases_of_the_catalogue_count_as_the_same():
    pairs = itertools.product(PHRASES[::211], PHRASES)
    assert [pair for pair in pairs if pair[0] < pair[1] and similarity(*pair) > SIMILAR] == []
    for place in DEPARTMENTS:
        every = [value for each in place.options.values() for value in each]
        assert not any(itertools.starmap(same_option, itertools.combinations(every, 2)))


def test_exactly_the_intended_product_satisfies_each_goal(env):
    products, goals = env.catalogue.products, env.catalogue.goals
    assert len(goals) > 2400
    asked = {phrase for goal in goals[::211] for phrase in goal.attributes}
    holders = {
        phrase: {at for at, each in enumerate(products) if has_attribute(each, phrase)}
        for phrase in asked
    }
    for goal in goals[::211]:
        # Who has an attribute is asked of the score's own function; the rest of the score, with all
        # options chosen at once, is an upper bound of what any choice earns.
        having = set.intersection(*(holders[each] for each in goal.attributes))
        full = [at for at in having if score(goal, products[at], values(products[at])) == 1]
        assert [products[at] for at in full] == [goal.product]
        assert score(goal, goal.product, goal.options) == 1 > score(goal, goal.product, [])


def test_a_price_limit_is_above_the_price_by_at_most_forty_or_absent():
    generator = np.random.Generator(np.random.PCG64(0))
    limits = {price_limit(25.0, generator) for _ in range(100)}
    assert limits == {40.0, 50.0, 60.0}
    assert price_limit(30.0, generator) >= 50  # 40, 50, 60, 70, the lower of two left out
    assert price_limit(975.0, generator) == 990.0 and price_limit(985.0, generator) == NO_LIMIT


# The score


BOOTS = Product(
    "B1",
    ("clothing", "hiking boots"),
    "hiking boots",
    "Norvale Waterproof Hiking Boots with Steel Toe",
    80.0,
    ("waterproof", "steel toe"),
    {"color": ("black", "dark brown"), "size": ("9", "10")},
    "Boots for rain.",
    ("Has a Rubber Sole",),
)
GOAL = Goal("", BOOTS, ("waterproof", "rubber sole"), ("brown", "9"), 90.0)


def test_score_follows_the_published_formula():
    fields = {name: getattr(BOOTS, name) for name in BOOTS.__slots__} | {"path": ("x",)}
    right = ("dark brown", "9")
    for changes, chosen, expected in (
        ({}, right, 1.0),  # 1 · (2 + 2 + 1) / 5, the sole found in the features
        ({}, ("dark brown",), 4 / 5),
        ({}, ("black", "10"), 3 / 5),
        ({}, (), 3 / 5),
        ({"price": 95.0}, right, 4 / 5),
        ({"features": ()}, right, 4 / 5),
        ({"title": "Hiking Poles", "query": "poles"}, right, 1 / 2),
        # 1 of 6 words is shared, 16.7 %: neither query nor two levels nor 20 % agree.
        ({"title": "Red Lamp", "query": "lamp", "path": ()}, right, 0.0),
    ):
        assert score(GOAL, Product(**fields | changes), chosen) == pytest.approx(expected)


def test_type_follows_query_categories_and_words():
    def typed(title, path=(), query="q"):
        return Product("B2", path, query, title, 1.0)

    wanted = typed("One Two Three Four Five Six Seven Eight Nine Ten Eleven", ("a", "b"), "numbers")
    for bought, expected in (
        (typed("a lamp"), 0.0),
        (typed("one"), 0.1),  # 1 of 11 words
        (typed("one two"), 0.5),  # 2 of 11, 18 %
        (typed("one two", query="numbers"), 1.0),
        (typed("one two", ("a", "b")), 1.0),
        (typed("one two", ("a", "c")), 0.5),
        (typed("one two three"), 1.0),  # 27 %
        (typed("the lamp", ("a", "b"), "numbers"), 0.0),  # no word: nothing else counts
    ):
        assert type_factor(bought, wanted) == expected


def test_similarity_is_the_token_set_ratio():
    for one, other, expected in (  # by rapidfuzz 3.14, which the original's fuzzy matching calls
        *(("cotton", "cotton blend", 100), ("Easy-Care", "care easy", 100)),
        *(("pack of 2", "pack of 3", 89), ("water resistant", "stain resistant", 75)),
        *(("12 bags", "24 bags", 86), ("small", "large", 20), ("", "large", 0), ("!", "?", 0)),
    ):
        assert similarity(one, other) == similarity(other, one) == expected
    # Colors count as the same by their name.
    assert same_option("deep navy", "navy | white") and not same_option("navy", "red")
    assert same_option("size 9 wide", "9") and not same_option("9", "10")


# Actions and pages


def test_actions_are_read_regardless_of_case_and_spaces():
    for text, expected in (
        ("search[hiking boots]", ("search", "hiking boots")),
        ("  SEARCH [ Hiking\n  boots ] ", ("search", "hiking boots")),
        ("click[< Prev]", ("click", "< prev")),
        ("Click[size [US] 9]", ("click", "size [us] 9")),
        ("click[]]", ("click", "]")),
        ("search[]", ("search", "")),
    ):
        assert parse_action(text) == expected
    for text in ("click[buy now] please", "I will click[buy now]", "click(buy now)", "buy now", ""):
        assert parse_action(text) == ("", "")


def test_an_impossible_action_changes_nothing(env):
    observation, _ = env.reset(seed=123)
    before = env.get_state()
    for action in (
        *("", "look", "search[]", "search[ ]", "click[]", "click[no such thing]", "click[search]"),
        *("click[buy now]", "click[next >]", "click[description]", "purchase[b0]", "[", "]"),
    ):
        assert env.step(action) == (
            *(observation, 0.0, False, False),
            {"success": False, "effective": False, "possible": False},
        )
        assert env.get_state() == before


def test_results_come_in_pages_of_ten_with_the_elements_that_lead_on(env):
    env.reset(seed=123)
    first = play(env, "search[hiking boots]")[0]
    codes = re.findall(r"^\[(\w{4})\] ", first, re.MULTILINE)
    assert len(codes) == 10 and clickable(first) == ["back to search", "next >", *codes]
    second = play(env, "click[next >]")[0]
    assert clickable(second)[:3] == ["back to search", "< prev", "next >"]
    assert not set(codes) & set(clickable(second))
    last = play(env, *["click[next >]"] * 9)[0]
    assert "next >" not in clickable(last) and " of 50" not in first.splitlines()[-1]
    assert play(env, *["click[< prev]"] * 9)[0] == first
    assert clickable(play(env, "click[Back to Search]")[0]) == ["nothing"]
    nothing = play(env, "search[xyzzy]")[0]
    assert nothing.splitlines()[1] == "Page: results for xyzzy: none"
    assert clickable(nothing) == ["back to search"]


def test_options_stay_chosen_on_the_pages_of_a_product_and_not_beyond(env):
    env.reset(seed=123)
    results = play(env, "search[dog bed]")[0]
    code = clickable(results)[2]
    product = env.catalogue.products[env.catalogue.places[code]]
    color = product.options["color"][-1]
    item = play(env, f"click[{code.upper()}]", f"click[{color}]")[0]
    assert f"color (chosen: {color})" in item
    for page in ("description", "features", "reviews"):
        text = play(env, f"click[{page}]")[0]
        assert clickable(text) == ["back to search", "< prev"]
        shown = {"description": [product.description]}.get(page, getattr(product, page, None))
        assert text.splitlines()[2:-1] == list(shown)
        assert play(env, "click[< prev]")[0] == item
    assert play(env, "click[< prev]")[0] == results
    assert "chosen" not in play(env, f"click[{code}]")[0]


def test_a_purchase_pays_its_score_and_ends_the_episode(env):
    env.reset(seed=123)
    goal = env.catalogue.goals[123]
    key = goal.product.key.lower()
    play(env, f"search[{goal.product.title}]", f"click[{key}]")
    asked = len(goal.attributes) + len(goal.options) + 1
    observation, reward, terminated, truncated, info = env.step("click[buy now]")
    assert reward == pytest.approx((asked - len(goal.options)) / asked)
    assert terminated and not truncated and not info["success"]
    assert f"Score: {reward:.3g}" in observation and clickable(observation) == ["nothing"]
    again = env.step("search[boots]")
    assert again[:3] == (observation, 0.0, True) and not again[4]["possible"]


HOSTILE = (
    *('"', '""', "'", "boots'; DROP TABLE page; --", '"unclosed', "boots*", "^boots", "text:boots"),
    *("boots AND", "OR", "NOT boots", "NEAR(boots tent, 2)", "NEAR", "{x y}:z", "(", "-boots", "+"),
    *("boots AND NOT (tent OR", "\x00", "a\x00b", "_", "ß ﬁ İ", "🥾", "日本", "%", "\\", "٣"),
    *(" ".join(f"w{n}" for n in range(500)), "boots " * 5000),
)


def test_any_text_is_a_search(env):
    for keywords in HOSTILE:
        env.reset(seed=123)
        observation, reward, terminated, _, _ = env.step(f"search[{keywords}]")
        assert reward == 0 and not terminated and len(observation) < 2000
        found = any(word in keywords for word in ("boots", "tent"))
        assert (len(clickable(observation)) > 1) == found


def test_search_finds_word_forms_and_ranks_full_matches_first(env):
    search = env.catalogue.search
    assert search("boot") == search("Boots") != ()
    products = env.catalogue.products
    for product in products[::50]:
        assert product in [products[at] for at in search(product.title)[:10]]
    assert search("the of with") == ()


# Levels and play


def test_the_published_splits_share_no_goal(env):
    def goals(split, levels):
        played = make("webshop", split=split)
        return {played.reset(seed=level) and played.get_state()["goal"] for level in levels}

    number = len(env.catalogue.goals)
    assert goals("test", range(501)) == set(range(500))
    assert goals("validation", range(1001)) == set(range(500, 1500))
    assert goals("train", range(number)) == set(range(1500, number))
    assert max(goals("all", range(number - 3, number))) == number - 1
    assert goals("auto", range(123, 379)) == set(range(123, 379))  # evaluation
    assert min(goals("auto", range(10_000, 10_500))) >= 1500  # training
    assert min(goals("auto", [2**31, 2**31 + 5])) >= 1500


def test_the_solver_succeeds_on_test_goals_in_five_turns(env):
    for level in range(0, 500, 10):
        env.reset(seed=level)
        for left in range(5, 0, -1):
            (action,) = env.solve(left, left, 1)
            _, reward, terminated, _, info = env.step(action)
            assert info["possible"] and info["effective"]
            if terminated:
                break
        assert terminated and reward == 1 and info["success"]


def test_random_play_searches_for_the_beginning_of_the_instruction_and_clicks_what_is_there(env):
    generator = np.random.Generator(np.random.PCG64(0))
    env.reset(seed=123)
    instruction = env.catalogue.goals[123].instruction.lower()
    searches = {parse_action(env.random_action(generator)) for _ in range(300)}
    assert {name for name, _ in searches} == {"search"}
    assert all(instruction.startswith(words) for _, words in searches)
    assert len(searches) == len(instruction.split()), "up to each of its words"
    observation = play(env, "search[dog bed]")[0]
    drawn = {parse_action(env.random_action(generator)) for _ in range(300)}
    assert {element for name, element in drawn if name == "click"} == set(clickable(observation))
    assert any(name == "search" for name, _ in drawn)


def test_numbered_products_and_options_are_the_same_called_by_their_place(env):
    numbered, coded = make("webshop", on_page=3, numbered=True), make("webshop", on_page=3)
    assert "the number of a product" in numbered.rules and "the code of a product" in coded.rules
    pages = []
    for shop in (numbered, coded):
        shop.reset(seed=123)
        pages.append(play(shop, "search[dog bed]", "click[next >]")[0])
    in_numbers, codes = pages[1], clickable(pages[1])[-3:]
    for number, code in enumerate(codes, 1):  # which begin again on each page
        in_numbers = in_numbers.replace(code, str(number))
    assert pages[0] == in_numbers
    assert not numbered.step(f"click[{codes[1]}]")[4]["possible"]
    pages = [play(numbered, "click[2]")[0], play(coded, f"click[{codes[1]}]")[0]]
    color, size = coded._product.options.values()
    count = len(color) + len(size)
    assert clickable(pages[0])[-count:] == [str(number) for number in range(1, count + 1)]
    assert clickable(pages[1])[-count:] == [*color, *size]
    without = re.sub(r"\[\d+\] ", "", pages[0])
    assert without.splitlines()[:-1] == pages[1].splitlines()[:-1]
    chosen = play(numbered, f"click[{count}]")[0]
    assert f"size (chosen: {size[-1]}): [{len(color) + 1}] {size[0]}" in chosen
    play(coded, f"click[{size[-1]}]")
    assert numbered.get_state() == coded.get_state()
    budget, levels = Budget(6, 1, 6), range(123, 126)
    found = compute_baselines(numbered, budget, levels)
    assert found.optimal == found.optimal_return == 1
    assert found == compute_baselines(coded, budget, levels)
    check(numbered, levels=1)


def test_baselines_are_near_zero_and_one_within_the_budget(env):
    levels = range(123, 131)
    found = compute_baselines(env, Budget(9, 1, 9), levels)
    assert found.random < 0.05 and 0 < found.random_return < 0.2 and found.draws is not None
    assert (found.optimal, found.optimal_return) == (1.0, 1.0)
    # A search, a product, one or two options, the purchase.
    assert compute_baselines(env, Budget(3, 1, 3), levels).optimal == 0
    assert 0 < compute_baselines(env, Budget(4, 1, 9), levels).optimal < 1


def test_a_snapshot_brings_back_every_page(env):
    env.reset(seed=123)
    goal, other = env.catalogue.goals[123], make("webshop")
    option, code = values(goal.product)[0], goal.product.key
    search = f"search[{goal.product.title}]"
    for action in (search, f"click[{code}]", f"click[{option}]", "click[reviews]"):
        env.step(action)
        other.reset(seed=7)
        other.set_state(json.loads(json.dumps(env.get_state())))
        assert other.get_state() == env.get_state() and other.state_key() == env.state_key()
    rest = ["click[< prev]", "click[buy now]"]
    assert [env.step(action) for action in rest] == [other.step(action) for action in rest]


# The original files


def record(key, name, **changes):
    """A product as `items_shuffle.json` has it, with only the keys that are read."""
    return {
        "asin": key,
        "name": name,
        "category": "fashion",
        "query": " Men's Shirts ",
        "product_category": "Clothing › Men › Shirts",
        "full_description": f"{name}, for every day.",
        "small_description": ["100% cotton", "Machine wash"],
        "pricing": "$19.99",
        "customization_options": {
            "Color": [{"value": " Navy/White ", "image": None}, {"value": "Red", "image": "x"}],
            "Size": [{"value": "Small"}, {"value": "Large"}],
        },
        "images": ["https://example.org/a.jpg"],
    } | changes


@pytest.fixture
def files(tmp_path):
    products = [
        record("B000000001", "Plain Oxford Shirt"),
        record("B000000002", "Linen Summer Shirt", pricing="$25.00 to $35.00"),
        record("B000000003", "Desk Lamp", query="lamps", pricing="", customization_options=""),
        record("B000000001", "A second record of the first"),
        record("TOO LONG A CODE", "No code"),
        record("nan", "No code either"),
    ]
    about = {
        "B000000001": {
            "attributes": ["long sleeve", "button closure"],
            "instruction": "Find me men's shirts with long sleeve",
            "instruction_attributes": ["long sleeve"],
        },
        "B000000002": {"attributes": ["regular fit"]},
    }
    human = {
        "B000000001": [
            {
                "asin": "B000000001",
                "instruction": "i want a navy shirt with long sleeve, in large.",
                "instruction_attributes": ["long sleeve", "cotton"],
                "instruction_options": ["navy | white", "large"],
            },
            {"instruction": "no", "instruction_attributes": [], "instruction_options": []},
        ],
        "B000000003": [
            {
                "instruction": "a lamp",
                "instruction_attributes": ["machine wash"],
                "instruction_options": [],
            }
        ],
    }
    for name, content in (
        ("items_shuffle_1000.json", products),
        ("items_ins_v2_1000.json", about),
        ("items_human_ins.json", human),
    ):
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


def shop(files, **params):
    return make("webshop", path=str(files), split="all", **params)


def test_the_original_files_become_products_and_human_goals(files):
    catalogue = shop(files).catalogue
    shirt, linen, lamp = catalogue.products
    assert (shirt.title, shirt.query, shirt.price) == ("Plain Oxford Shirt", "men's shirts", 19.99)
    assert shirt.path == ("Clothing", "Men", "Shirts") and shirt.price_text == "$19.99"
    assert shirt.options == {"color": ("navy | white", "red"), "size": ("small", "large")}
    assert shirt.attributes == ("long sleeve", "button closure")
    assert 25 <= linen.price <= 35 and linen.price_text == "$25.0 to $35.0"
    assert (lamp.price, lamp.options, lamp.attributes) == (100.0, {}, ())
    by_product = {goal.product.key: goal for goal in catalogue.goals}
    assert len(catalogue.goals) == 2 == len(by_product)
    goal = by_product["B000000001"]
    limit = goal.price_limit
    assert limit in (30.0, 40.0, 50.0) and goal.options == ("navy | white", "large")
    assert goal.instruction == (
        f"i want a navy shirt with long sleeve, in large, and price lower than {limit:.2f} dollars"
    )


def test_the_files_keep_the_contract_and_can_be_solved(files):
    env = shop(files)
    check(env, levels=2)
    assert compute_baselines(env, Budget(9, 1, 9), [0, 1]).optimal == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("items_human_ins.json", None, "FileNotFoundError"),
        ("items_ins_v2_1000.json", "{", "JSONDecodeError"),
        ("items_shuffle_1000.json", None, "there is no items_shuffle"),
        ("items_shuffle_1000.json", '[{"asin": "B1"}]', "KeyError"),
        ("items_human_ins.json", "{}", "has no goals"),
    ],
)
def test_damaged_files_are_refused_in_one_line(files, name, content, message):
    (files / name).unlink()
    if content is not None:
        (files / name).write_text(content)
    with pytest.raises(RagenError, match=message) as refused:
        shop(files)
    assert "\n" not in str(refused.value)
