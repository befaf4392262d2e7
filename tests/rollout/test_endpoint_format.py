"""Tools at chat endpoints: calls of an answer, results in the next request, and malformed calls."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.core.types import Episode
from ragen.envs.registry import make
from ragen.envs.worlds.sorting import BALLS, Sorting, best
from ragen.rollout.endpoint import ChatEndpoint, Server
from ragen.rollout.episode import play_episode
from ragen.rollout.setup import EpisodeSpec, Setup
from tests.faulty import Answer, FaultyServer, chat_reply
from tests.rollout.test_endpoint import in_order

pytestmark = pytest.mark.usefixtures("short_waits")

BROKEN = "Error: This call is not a JSON object with a name and arguments."
COMPARE = '{"first": "A", "second": "B"}'


def called(name: Any = "compare", arguments: Any = COMPARE, id_: Any = "call_of_the_server") -> Any:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: Any, content: str | None = None, **message: Any) -> Answer:
    return chat_reply(content, "tool_calls", tool_calls=list(calls), **message)


def played(server: FaultyServer, think: bool = False, **settings: Any) -> Episode:
    env = make("sorting")
    setup = Setup(
        "sorting",
        Sorting,
        4,
        2,
        6,
        "paper",
        think=think,
        prefilled=False,
        tools=env.tools,
        **settings,
    )

    async def play() -> Episode:
        policy = ChatEndpoint(Server(server.url), "m", think, setup.tools)
        try:
            return await play_episode(policy, setup, EpisodeSpec(123, 0, 0, (0, "eval")))
        finally:
            await policy.close()

    return asyncio.run(play())


def test_calls_and_their_results_in_the_requests() -> None:
    first, second = called(id_="x1"), called(arguments=COMPARE.replace("A", "C"), id_="x2")
    two = calling(first, second, content="I compare.")
    with FaultyServer(in_order(two, two, chat_reply("A B C D"))) as server:
        episode = played(server)
    first, second, third = (request["messages"] for request in server.requests)
    assert all(request["tools"] == list(make("sorting").tools) for request in server.requests)
    assert [each["role"] for each in first] == ["system", "user"]
    assert [each["role"] for each in second] == ["system", "user", "assistant", "tool", "tool"]
    said, *results = second[2:]
    assert said["content"] == "I compare."
    assert [json.loads(each["function"]["arguments"]) for each in said["tool_calls"]] == [
        {"first": "A", "second": "B"},
        {"first": "C", "second": "B"},
    ]
    assert [each["tool_call_id"] for each in results] == ["x1", "x2"]
    assert [each["id"] for each in said["tool_calls"]] == ["x1", "x2"]
    assert re.fullmatch(r"A is (lighter|heavier) than B\.", results[0]["content"])
    assert results[1]["content"].startswith("C is ") and "actions left" in results[1]["content"]
    ids = [call["id"] for each in third for call in each.get("tool_calls", ())]
    assert ids == [each["tool_call_id"] for each in third if each["role"] == "tool"]
    assert [turn.penalty for turn in episode.turns] == [0, 0, 0]
    assert episode.turns[0].results == tuple(
        result["content"].partition("\n")[0] for result in results
    )
    assert episode.stop_reason in ("solved", "failed")


@pytest.mark.parametrize(
    ("answer", "thought"),
    [
        (calling(called()), ""),
        (calling(called(), reasoning_content="which?"), "which?"),
        (calling(called(), content="<think>which?</think>"), "which?"),
    ],
)
def test_thoughts_beside_calls(answer: Answer, thought: str) -> None:
    """Most models write no text beside their calls, whatever the prompt says."""
    with FaultyServer(in_order(answer, chat_reply("<think>so</think>A B C D"))) as server:
        episode = played(server, think=True)
    assert [turn.thought for turn in episode.turns] == [thought, "so"]
    assert all(turn.valid for turn in episode.turns)
    said = server.requests[1]["messages"][2]
    sent = answer.body["choices"][0]["message"]
    assert [said["content"], said.get("reasoning_content")] == [
        sent["content"],
        sent.get("reasoning_content"),
    ]
    assert said["tool_calls"][0]["function"]["name"] == "compare"


MALFORMED: dict[str, tuple[Any, str]] = {
    "arguments that are no JSON": (called(arguments='{"first": "A"'), BROKEN),
    "arguments of a deep text": (called(arguments="[" * 5000), BROKEN),
    "a surrogate": (called(arguments='{"first": "\\ud800"}'), BROKEN),
    "no arguments": (called(arguments=""), "Error: first: Missing required argument"),
    "a tag in an argument": (
        called(arguments='{"first": "</tool_call>", "second": "B"}'),
        "Error: first: Input should be",
    ),
    "an unknown tool": (called(name="weigh"), "Error: there is no tool of that name"),
    "a name that servers refuse": (called(name="no such\ntool!"), "Error: there is no tool"),
    "nothing": (None, BROKEN),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_calls_are_results_beside_the_others(name: str) -> None:
    """A request with them is in a form that servers take, and the episode goes on."""
    call, result = MALFORMED[name]
    script = in_order(calling(call, called(id_=None)), chat_reply("A B C D"))
    with FaultyServer(script) as server:
        episode = played(server)
    turn = episode.turns[0]
    assert turn.results is not None and turn.results[0].startswith(result)
    assert turn.results[1].startswith("A is ")
    assert turn.valid == (result != BROKEN) and (turn.penalty < 0) == (result == BROKEN)
    sent = server.requests[1]["messages"]
    assert len({each["id"] for each in sent[2]["tool_calls"]}) == 2
    assert [each["id"] for each in sent[2]["tool_calls"]] == [
        each["tool_call_id"] for each in sent[3:]
    ]
    for each in sent[2]["tool_calls"]:
        assert isinstance(json.loads(each["function"]["arguments"]), dict)
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", each["function"]["name"])
    assert episode.stop_reason in ("solved", "failed") and len(episode.turns) == 2


@pytest.mark.parametrize("calls", [None, [], {}, "compare", 7])
def test_an_answer_without_calls_is_read_as_text(calls: Any) -> None:
    with FaultyServer(in_order(chat_reply("A B C D", tool_calls=calls))) as server:
        episode = played(server)
    assert episode.stop_reason in ("solved", "failed") and len(episode.turns) == 1


def test_calls_that_a_server_leaves_in_the_text_are_sent_back_as_calls() -> None:
    text = f'<tool_call>\n{{"name": "compare", "arguments": {COMPARE}}}\n</tool_call>'
    with FaultyServer(in_order(chat_reply(text), chat_reply("A B C D"))) as server:
        episode = played(server)
    assert episode.turns[0].results is not None
    assert server.requests[1]["messages"][2]["tool_calls"][0]["function"]["name"] == "compare"


@pytest.mark.parametrize("tag", ["</think>", "<think>", "<tool_call>", "</tool_call>"])
def test_tags_in_the_json_of_a_call_that_is_left_in_the_text(tag: str) -> None:
    said = json.dumps({"name": "compare", "arguments": {"first": tag, "second": "B"}})
    text = f"so</think>\nI {{compare}}.\n<tool_call>\n{said}\n</tool_call>"
    script = in_order(chat_reply(text), chat_reply("<think>x</think>A B C D"))
    with FaultyServer(script) as server:
        episode = played(server, think=True)
    turn = episode.turns[0]
    assert turn.valid and turn.thought == "so" and turn.results is not None
    assert turn.results[0].startswith("Error: first: Input should be")
    sent = server.requests[1]["messages"][2]
    assert sent["content"] == "<think>so</think>\nI {compare}."
    assert json.loads(sent["tool_calls"][0]["function"]["arguments"])["first"] == tag


def test_a_thought_that_opens_json_which_a_call_closes_is_no_fault_of_ours() -> None:
    """The thought and the call together spell a JSON list; apart they are a thought and a call."""
    text = '<think>["</think><tool_call>", 1]</tool_call>'
    with FaultyServer(in_order(chat_reply(text), chat_reply("<think>x</think>A B C D"))) as server:
        episode = played(server, think=True)
    assert episode.turns[0].results == (BROKEN,) and len(episode.turns) == 2


def sorts(_: int, body: dict[str, Any]) -> Answer:
    """Optimal play, from nothing but the conversation."""
    found = re.findall(r"(\w) is (lighter|heavier) than (\w)", json.dumps(body["messages"][2:]))
    lighter = [(a, b) if way == "lighter" else (b, a) for a, way, b in found]
    orders = map("".join, permutations(BALLS))
    left = frozenset(o for o in orders if all(o.index(a) < o.index(b) for a, b in lighter))
    turns = sum(message["role"] == "assistant" for message in body["messages"])
    _, pairs = best(left, 4 - turns, 6 - len(found), 2)
    if not pairs:
        return chat_reply(f"<think>known</think>{' '.join(min(left))}")
    return calling(*(called(arguments=json.dumps({"first": a, "second": b})) for a, b in pairs))


def test_a_tool_environment_is_evaluated_at_an_endpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FaultyServer(sorts) as server:
        options = f"--env sorting --episodes 6 --json --out {tmp_path}"
        command = f"eval m --base-url {server.url} {options}"
        assert main(command.split()) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["success"], result["optimal"], result["valid_fraction"]) == (1.0, 1.0, 1.0)


SIGNED = {"extra_content": {"google": {"thought_signature": "s1"}}, "index": 0}
KEPT: dict[str, dict[str, Any]] = {
    "a signature in a call": {"tool_calls": [{**called(), **SIGNED}]},
    "reasoning in a field": {"reasoning_content": "which?", "tool_calls": [called()]},
    "fields that nobody knows": {"x": {"y": [1, None]}, "tool_calls": [called() | {"z": 1.5}]},
    "content as parts": {
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}], "signature": "s"},
            {"type": "text", "text": "I compare."},
        ],
        "tool_calls": [called()],
    },
    "a spelling of the arguments": {
        "tool_calls": [called(arguments='{"second" :"B",\n "first": "\\u0041"}')]
    },
    "arguments as an object": {"tool_calls": [called(arguments=json.loads(COMPARE))]},
    "no call": {"content": "no answer: <b", "refusal": "no", "annotations": [], "audio": {"id": 7}},
}


@pytest.mark.parametrize("name", KEPT)
def test_a_message_goes_back_to_its_server_unchanged(name: str) -> None:
    message = KEPT[name]
    nulls = {"function_call": None, "refusal": None} | message
    finish = "tool_calls" if "tool_calls" in message else "length"
    script = in_order(chat_reply(**({"content": None} | nulls), finish=finish), chat_reply("A B"))
    with FaultyServer(script) as server:
        episode = played(server, think=True)
    sent = server.requests[1]["messages"][2]
    assert sent == {"role": "assistant", "content": None} | message
    for result in server.requests[1]["messages"][3:-1] if "tool_calls" in message else ():
        assert result["tool_call_id"] == "call_of_the_server"
    if name == "content as parts":
        assert episode.turns[0].thought == "hm" and episode.turns[0].valid


def test_the_tag_of_a_thought_that_the_template_opens_goes_back() -> None:
    """Such a server sends a reply without ``<think>``, and its model has sampled after one."""
    script = in_order(chat_reply("hm</think>A B"), chat_reply("hm</think>A B"))
    with FaultyServer(script) as server:
        played(server, think=True)
    assert server.requests[1]["messages"][2]["content"] == "<think>hm</think>A B"


def test_dropped_thoughts_stay_away_and_signatures_do_not() -> None:
    signed = calling(called() | SIGNED, reasoning_content="which?", content="<think>a</think>I do.")
    with FaultyServer(in_order(signed, chat_reply("A B C D"))) as server:
        played(server, think=True, drops_thoughts=True)
    assert server.requests[1]["messages"][2] == {
        "role": "assistant",
        "content": "I do.",
        "tool_calls": [called() | SIGNED],
    }


ODD: dict[str, dict[str, Any]] = {
    "a NaN": {"x": float("nan"), "tool_calls": [called()]},
    "calls in the text and beside it": {
        "content": f'<tool_call>{{"name": "compare", "arguments": {COMPARE}}}</tool_call>',
        "tool_calls": [called()],
    },
    "content as a number": {"content": 7, "tool_calls": [called()]},
    "no id, and an id twice": {"tool_calls": [called(id_=7), called(), called()]},
}


@pytest.mark.parametrize("name", ODD)
def test_a_message_that_cannot_go_back_is_written_anew(name: str) -> None:
    """A request is JSON, and each result has the id of a call."""
    script = in_order(chat_reply(**({"content": None} | ODD[name])), chat_reply("A B C D"))
    with FaultyServer(script) as server:
        episode = played(server)
    assert len(episode.turns) == 2 and episode.stop_reason in ("solved", "failed")
    _, _, said, *rest = server.requests[1]["messages"]
    assert [each["id"] for each in said.get("tool_calls", ())] == [
        each["tool_call_id"] for each in rest if each["role"] == "tool"
    ]
    assert isinstance(said["content"], str | None)
