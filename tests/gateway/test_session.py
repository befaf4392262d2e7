"""What agents do to a conversation, and what becomes of the tokens that were sampled.

Each test is a fault that a gateway of this field has or had. The agent is a script that sends
requests; the policy says scripted replies, encoded once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from ragen.algorithms.samples import join
from ragen.chat.chat import Chat
from ragen.core.types import CallRole, Completion, Prompt, Turn
from ragen.gateway.messages import ChatMessage, Demand, Refused, Reply, Request, ToolCall
from ragen.gateway.session import FIRST_CALL, MOST_STOPS, STOP_TEXT, Budget, Session
from ragen.rollout.policies import written_completion
from tests.tiny import tiny_tokenizer
from tests.tool_templates import TOOL_TEMPLATES, tool_tokenizer

GUESS = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "guess", "arguments": {"n":  4}}\n</tool_call>'

Script = Callable[["Agent"], Awaitable[None]]


def said(role: str, text: str | None, *calls: ToolCall, call_id: str = "") -> ChatMessage:
    return ChatMessage(role, text, calls, call_id)  # type: ignore[arg-type]


class Agent:
    """A scripted agent: it counts its requests, so that each has a body of its own."""

    def __init__(self, chat: Chat, replies: Sequence[str], **budget: object) -> None:
        self.chat = chat
        self.prompts: list[Prompt] = []
        self._replies = iter(replies)
        limits = {"calls": 20, "max_tokens": 64, "max_length": 4096, **budget}
        self.session = Session(chat, Budget(**limits), self._complete, self._seed)  # type: ignore[arg-type]
        self.seeds: list[tuple[tuple[int, ...], int]] = []
        self._count = 0

    def _seed(self, ids: Sequence[int], times: int) -> int:
        self.seeds.append((tuple(ids), times))
        return len(self.seeds)

    async def _complete(self, prompt: Prompt, is_first: bool) -> Completion:
        self.prompts.append(prompt)
        text = next(self._replies)
        await asyncio.sleep(0)
        end = (self.chat.end,)
        return written_completion(text, lambda t: (*self.chat.encode_text(t), *end))

    async def ask(
        self,
        *messages: ChatMessage,
        tools: Sequence[dict[str, object]] = (),
        body: bytes | None = None,
        is_retry: bool = False,
        role: CallRole | None = None,
        **more: object,
    ) -> Reply:
        self._count += 1
        request = Request(messages, tuple(tools), **more)  # type: ignore[arg-type]
        return await self.session.reply(
            body or str(self._count).encode(),
            request,
            is_retry=is_retry,
            role=role,
        )

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.session.turns()[0]

    def check(self) -> None:
        """Every sampled token of the trained turns is in exactly one sample, with its logprob."""
        turns = self.turns
        samples = join([(turn.prompt, turn.completion) for turn in turns], 0, 0)
        trained: dict[int, list[int]] = {}
        for sample in samples:
            for token, mask, turn in zip(
                sample.token_ids, sample.loss_mask, sample.turn_index, strict=True
            ):
                if mask:
                    trained.setdefault(turn, []).append(token)
        assert [tuple(trained[n]) for n in range(len(turns))] == [
            turn.completion.token_ids for turn in turns
        ]


def agent(*replies: str, **budget: object) -> Agent:
    return Agent(Chat(tiny_tokenizer("chatml"), think=False), replies, **budget)


def tool_agent(*replies: str, template: str = "hermes") -> Agent:
    return Agent(Chat(tool_tokenizer(template), think=False), replies)


def run(script: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(script, 20))


HELLO = said("user", "Hello.")
AGAIN = said("user", "Again.")


def test_a_linear_conversation_is_one_sample_with_the_sampled_ids() -> None:
    one = agent("Yes  it is. ", "No.")

    async def script() -> None:
        first = await one.ask(said("system", "Be short."), HELLO)
        await one.ask(said("system", "Be short."), HELLO, first.message, AGAIN)

    run(script())
    first, second = one.turns
    assert second.prompt.token_ids is not None and first.prompt.token_ids is not None
    assert first.completion.token_ids is not None
    whole = first.prompt.token_ids + first.completion.token_ids
    assert second.prompt.token_ids[: len(whole)] == whole
    assert [turn.call.link for turn in one.turns if turn.call] == [FIRST_CALL, "verbatim"]
    assert second.observation == "Again."
    one.check()


@pytest.mark.parametrize(
    ("text", "link"),
    [("Yes it is.", "other white space"), ("Yes  it is. ", "verbatim"), ("Yes.", None)],
)
def test_a_rewritten_reply_links_if_it_says_the_same_and_is_context_if_not(
    text: str, link: str | None
) -> None:
    one = agent("Yes  it is. ", "No.")

    async def script() -> None:
        await one.ask(HELLO)
        await one.ask(HELLO, said("assistant", text), AGAIN)

    run(script())
    call = one.turns[1].call
    assert call is not None
    assert call.parent == (-1 if link is None else 0)
    assert call.link == (link or "message 2 (assistant) is new: Yes.")
    assert len(join([(turn.prompt, turn.completion) for turn in one.turns], 0, 0)) == 1 + (
        link is None
    )
    one.check()


def test_a_rewritten_system_prompt_begins_another_conversation() -> None:
    one = agent("Yes.", "No.", "Good.")

    async def script() -> None:
        first = await one.ask(said("system", "Step 1."), HELLO)
        second = await one.ask(said("system", "Step 2."), HELLO, first.message, AGAIN)
        await one.ask(said("system", "Step 2."), HELLO, first.message, AGAIN, second.message, HELLO)

    run(script())
    assert [turn.call.parent for turn in one.turns if turn.call] == [-1, -1, 1]
    assert one.turns[1].call is not None
    assert one.turns[1].call.link == "message 1 (system) is new: Step 2."
    one.check()


def test_the_reason_for_a_new_root_is_the_first_part_that_is_new() -> None:
    """A reply that came back with other white space, or an added message, is not the reason."""
    one = tool_agent("Yes  it is. ", CALL, "No.", "Done.", "Done.")

    async def script() -> None:
        await one.ask(HELLO, tools=[GUESS])
        yes = said("assistant", "Yes it is.")
        second = await one.ask(HELLO, yes, AGAIN, tools=[GUESS])
        changed = said("assistant", None, replace(second.calls[0], arguments='{"n": 5}'))
        result = said("tool", "no", call_id=changed.calls[0].id)
        await one.ask(HELLO, yes, AGAIN, changed, result, tools=[GUESS])
        await one.ask(HELLO, yes, AGAIN)
        await one.ask(HELLO, tools=[GUESS])

    run(script())
    turns, others = one.session.turns()
    links = [turn.call.link for turn in (*turns, *others) if turn.call]
    assert links == [
        FIRST_CALL,
        "other white space",
        'message 4 (assistant) is new: guess {"n": 5}',
        "the same prompt once more",
        "no earlier call offers these tools",
    ]


def test_a_fork_trains_each_token_once() -> None:
    one = agent("Root.", "Left.", "Right.", "Left again.")

    async def script() -> None:
        root = await one.ask(HELLO)
        left = await one.ask(HELLO, root.message, said("user", "Left?"))
        await one.ask(HELLO, root.message, said("user", "Right?"))
        await one.ask(HELLO, root.message, said("user", "Left?"), left.message, AGAIN)

    run(script())
    assert [turn.call.parent for turn in one.turns if turn.call] == [-1, 0, 0, 1]
    samples = join([(turn.prompt, turn.completion) for turn in one.turns], 0, 0)
    assert [sorted({*sample.turn_index} - {-1}) for sample in samples] == [[0, 1, 3], [2]]
    one.check()


def test_parallel_calls_are_one_tree_in_any_order() -> None:
    """Sub-agents interleave: each continues its own conversation."""
    one = agent(*(f"Reply {n}." for n in range(8)))

    async def worker(name: str) -> None:
        mine = said("user", f"Task of {name}.")
        first = await one.ask(mine)
        await one.ask(mine, first.message, AGAIN)

    async def script() -> None:
        root = await one.ask(HELLO)
        await asyncio.gather(worker("a"), worker("b"))
        await one.ask(HELLO, root.message, AGAIN)

    run(script())
    parents = [turn.call.parent for turn in one.turns if turn.call]
    assert parents == [-1, -1, -1, 1, 2, 0]
    assert len(join([(turn.prompt, turn.completion) for turn in one.turns], 0, 0)) == 3
    one.check()


def test_a_retry_gets_the_same_reply_and_no_second_call() -> None:
    one = agent("Once.", "Next.")

    async def script() -> None:
        first, again = await asyncio.gather(
            one.ask(HELLO, body=b"x"), one.ask(HELLO, body=b"x", is_retry=True)
        )
        assert first == again
        for _ in range(2):  # both clients leave, and one asks again without saying so
            one.session.lost(first)
        assert await one.ask(HELLO, body=b"x") == first
        assert await one.ask(HELLO, body=b"x") != first  # the same question once more

    run(script())
    assert len(one.turns) == 2
    assert [times for _, times in one.seeds] == [0, 1]


def test_a_reply_whose_client_left_is_not_trained_on() -> None:
    one = agent("Lost.", "Kept.")

    async def script() -> None:
        one.session.lost(await one.ask(HELLO, body=b"x"))
        await one.ask(HELLO, AGAIN)

    run(script())
    turns, others = one.session.turns()
    assert [turn.completion.text for turn in turns] == ["Kept."]
    assert [turn.call.role for turn in others if turn.call] == ["discarded"]


def test_a_reply_that_a_retry_has_got_is_trained_on_although_the_first_client_left() -> None:
    one = agent("Once.")

    async def script() -> None:
        first, _ = await asyncio.gather(
            one.ask(HELLO, body=b"x"), one.ask(HELLO, body=b"x", is_retry=True)
        )
        one.session.lost(first)  # as the server notices late

    run(script())
    assert [turn.completion.text for turn in one.turns] == ["Once."]


def test_a_policy_that_fails_is_noted_although_the_client_has_left() -> None:
    one = agent()  # has no reply

    async def script() -> None:
        waiting = asyncio.ensure_future(one.ask(HELLO))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0.01)

    run(script())
    assert one.session.failure is not None


def test_of_equal_questions_the_one_whose_client_left_is_asked_again() -> None:
    one = agent("A.", "B.")

    async def script() -> None:
        waiting = asyncio.ensure_future(one.ask(HELLO, body=b"x"))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(one.ask(HELLO, body=b"x"))
        await asyncio.sleep(0)
        waiting.cancel()  # its client leaves while it waits
        assert (await second).text == "B."
        assert (await one.ask(HELLO, body=b"x")).text == "A."

    run(script())
    assert sorted(turn.completion.text for turn in one.turns) == ["A.", "B."]


def test_equal_questions_at_once_are_different_samples() -> None:
    one = agent("A.", "B.", "C.")

    async def script() -> None:
        await asyncio.gather(*[one.ask(HELLO) for _ in range(3)])

    run(script())
    assert sorted(times for _, times in one.seeds) == [0, 1, 2]
    assert len({ids for ids, _ in one.seeds}) == 1
    assert [turn.call.role for turn in one.turns if turn.call] == ["agent"] * 3


def test_a_call_without_tools_beside_others_is_auxiliary_unless_it_is_the_last() -> None:
    one = tool_agent("A title", CALL, "Four it is.")

    async def script() -> None:
        await one.ask(said("user", "Name this conversation."))
        first = await one.ask(HELLO, tools=[GUESS])
        result = said("tool", "right", call_id=first.calls[0].id)
        await one.ask(HELLO, first.message, result)

    run(script())
    turns, others = one.session.turns()
    assert [turn.call.role for turn in others if turn.call] == ["auxiliary"]
    assert [turn.completion.text for turn in turns] == [CALL, "Four it is."]


def test_a_call_that_continues_an_auxiliary_one_names_it() -> None:
    one = agent("A title", "Yes.", "Another title", "Go on.")

    async def script() -> None:
        title = await one.ask(HELLO, role="auxiliary")
        await one.ask(AGAIN)
        next_title = await one.ask(HELLO, title.message, AGAIN, role="auxiliary")
        await one.ask(HELLO, title.message, AGAIN, next_title.message, HELLO)

    run(script())
    turns, others = one.session.turns()
    parents = [turn.call.parent for turn in (*turns, *others) if turn.call]
    assert [turn.completion.text for turn in (*turns, *others)] == [
        "Yes.",
        "Go on.",
        "A title",
        "Another title",
    ]
    assert parents == [-1, 3, -1, 2]


PLAN = 'First look at the "arms",\nthen pull \\frac{1}{2} of the café\'s 最好.'
SUMMARY = "So far: the agent has looked at the arms, and the second is best."


def roles(one: Agent) -> dict[str, str]:
    turns, others = one.session.turns()
    return {turn.completion.text: turn.call.role for turn in (*turns, *others) if turn.call}


def transcript(*texts: str) -> ChatMessage:
    """A conversation as one text, in JSON, as some harnesses summarise it."""
    return said("user", "Summarise: " + json.dumps([{"role": "x", "text": each} for each in texts]))


@pytest.mark.parametrize("role", [None, "compaction"])
def test_a_summary_that_a_conversation_begins_with_is_trained_on(role: CallRole | None) -> None:
    thinking = f"<think>What was there?</think>{SUMMARY}"
    one = agent(PLAN, thinking, "I pull the second.")

    async def script() -> None:
        await one.ask(HELLO)
        await one.ask(transcript("Hello.", PLAN), role=role)
        await one.ask(said("user", f"Go on.\n\n{SUMMARY}"))

    run(script())
    assert roles(one) == {PLAN: "agent", thinking: "compaction", "I pull the second.": "agent"}
    assert [turn.completion.text for turn in one.turns] == [PLAN, thinking, "I pull the second."]
    one.check()


def test_a_summary_that_the_agent_rejects_is_not_trained_on() -> None:
    """It goes on with its history instead."""
    one = agent(PLAN, SUMMARY, "I pull the second.")

    async def script() -> None:
        plan = await one.ask(HELLO)
        await one.ask(said("user", f"Summarise:\nUser: Hello.\nAssistant: {PLAN}"))
        await one.ask(HELLO, plan.message, AGAIN)

    run(script())
    assert roles(one) == {PLAN: "agent", SUMMARY: "discarded", "I pull the second.": "agent"}
    one.check()


@pytest.mark.parametrize("role", [None, "compaction"])
def test_of_two_summaries_the_one_that_is_used_is_trained_on(role: CallRole | None) -> None:
    one = agent(PLAN, "Too long, it cannot be used.", SUMMARY, "I pull the second.")

    async def script() -> None:
        await one.ask(HELLO)
        await one.ask(transcript("Hello.", PLAN), role=role)
        await one.ask(transcript("Hello.", PLAN, "Shorter!"), role=role)
        await one.ask(said("user", SUMMARY))

    run(script())
    assert roles(one)["Too long, it cannot be used."] == "discarded"
    assert roles(one)[SUMMARY] == "compaction"
    one.check()


def test_a_summary_in_the_same_conversation_without_tools_is_trained_on() -> None:
    one = tool_agent(CALL, SUMMARY, CALL)

    async def script() -> None:
        first = await one.ask(HELLO, tools=[GUESS])
        result = said("tool", "right", call_id=first.calls[0].id)
        summary = await one.ask(HELLO, first.message, result, said("user", "Summarise."))
        await one.ask(said("user", f"{summary.text} Go on."), tools=[GUESS])

    run(script())
    assert set(roles(one).values()) == {"agent"}
    assert len(one.turns) == 3


def test_a_declared_summary_is_rejected_if_its_conversation_goes_on_without_it() -> None:
    one = agent("Yes.", SUMMARY, "No.", "I pull.")

    async def script() -> None:
        first = await one.ask(HELLO)
        await one.ask(HELLO, first.message, said("user", "Summarise."), role="compaction")
        second = await one.ask(HELLO, first.message, AGAIN)
        await one.ask(HELLO, first.message, AGAIN, second.message, HELLO)

    run(script())
    assert roles(one) == {"Yes.": "agent", SUMMARY: "discarded", "No.": "agent", "I pull.": "agent"}


def test_conversations_about_a_reply_that_agents_weigh_up_are_trained_on() -> None:
    """Votes, drafts and critics of a plan are no summaries, although a program reads them."""
    votes = [f"Vote {n}: this plan is good enough." for n in range(3)]
    one = agent(PLAN, *votes, "It is done.")

    async def script() -> None:
        await one.ask(HELLO)
        for n in range(3):
            await one.ask(said("user", f"Judge {n}: is this a good plan? {PLAN}"))
        await one.ask(said("user", "Two of three agree. Carry it out."))

    run(script())
    assert [turn.completion.text for turn in one.turns] == [PLAN, *votes, "It is done."]


def test_a_reply_that_an_agent_rewrites_in_its_history_is_not_told() -> None:
    """Some write their calls anew as text; then each call begins a conversation."""
    one = agent(PLAN, "I look at the first of them.", "I look at the second.")

    async def script() -> None:
        plan = await one.ask(HELLO)
        await one.ask(HELLO, said("assistant", f"{PLAN}\nCalling tools: look"), AGAIN)
        await one.ask(HELLO, plan.message, AGAIN)

    run(script())
    assert set(roles(one).values()) == {"agent"}


def test_a_call_that_tells_the_answer_of_a_sub_agent_is_trained_on() -> None:
    """Although the sub-agent is asked again, and nothing follows the call."""
    one = agent("I ask another.", SUMMARY, "It says the second.", "Yes, the second.")

    async def script() -> None:
        first = await one.ask(HELLO)
        task = said("user", "Look at the arms for me.")
        answer = await one.ask(task)
        await one.ask(HELLO, first.message, said("user", f"It says: {SUMMARY}"))
        await one.ask(task, answer.message, AGAIN)

    run(script())
    assert set(roles(one).values()) == {"agent"}


def test_an_agent_can_say_that_a_call_belongs_to_its_work() -> None:
    one = agent(PLAN, "The critic says no to it.", "I pull the second.")

    async def script() -> None:
        plan = await one.ask(HELLO)
        await one.ask(said("user", f"Is this good? {PLAN}"), role="agent")
        await one.ask(HELLO, plan.message, AGAIN)

    run(script())
    assert set(roles(one).values()) == {"agent"}


def test_the_answer_of_a_sub_agent_without_tools_is_trained_on() -> None:
    one = tool_agent(CALL, SUMMARY, "Done, the second it is.")

    async def script() -> None:
        first = await one.ask(HELLO, tools=[GUESS])
        answer = await one.ask(said("user", "Look at the arms for me."))
        result = said("tool", json.dumps({"answer": answer.text}), call_id=first.calls[0].id)
        await one.ask(HELLO, first.message, result, tools=[GUESS])

    run(script())
    assert set(roles(one).values()) == {"agent"}


@pytest.mark.parametrize("template", sorted(TOOL_TEMPLATES))
def test_calls_come_back_respelt_and_keep_their_tokens(template: str) -> None:
    scripted = Chat(tool_tokenizer(template), think=False).offering([GUESS])
    assert scripted.calls is not None
    written = scripted.calls.write(['{"name": "guess", "arguments": {"n": 4}}'])
    thinks = scripted.opening != ""
    written = f"I guess.</think>{written}" if thinks else written
    one = tool_agent(written, "Done.", template=template)

    async def script() -> None:
        first = await one.ask(HELLO, tools=[GUESS])
        (call,) = first.calls
        assert (call.name, call.arguments) == ("guess", '{"n": 4}')
        respelt = said("assistant", None, replace(call, id="mine", arguments='{"n":4.0}'))
        await one.ask(HELLO, respelt, said("tool", "right", call_id="mine"), tools=[GUESS])

    run(script())
    first, second = one.turns
    link = "without the text beside calls" if thinks else "JSON written anew"
    assert second.call is not None and second.call.link == link
    assert first.results == ("right",)
    if scripted.exact:
        assert first.prompt.token_ids is not None and first.completion.token_ids is not None
        whole = first.prompt.token_ids + first.completion.token_ids
        assert second.prompt.token_ids is not None
        assert second.prompt.token_ids[: len(whole)] == whole
        text = scripted.spell(second.prompt.token_ids[len(whole) :])
        assert "right" in text
    one.check()


@pytest.mark.parametrize("template", ["hermes", "mistral", "thinker"])
def test_the_text_before_a_call_is_shown_and_comes_back(template: str) -> None:
    chat = Chat(tool_tokenizer(template), think=False).offering([GUESS])
    assert chat.calls is not None
    written = chat.calls.write(['{"name": "guess", "arguments": {"n": 4}}'])
    thought = "</think>" if chat.opening else ""
    replies = f"{thought}I guess [4].\n{written}", f"{thought}Done."
    one = tool_agent(*replies, template=template)

    async def script() -> None:
        first = await one.ask(HELLO, tools=[GUESS])
        assert (first.text or "").removeprefix(f"{chat.opening}</think>") == "I guess [4]."
        assert [call.name for call in first.calls] == ["guess"]
        result = said("tool", "low", call_id=first.calls[0].id)
        await one.ask(HELLO, first.message, result, tools=[GUESS])

    run(script())
    assert [turn.call.link for turn in one.turns if turn.call] == [FIRST_CALL, "verbatim"]
    one.check()


@pytest.mark.parametrize(
    ("demand", "problem"),
    [
        (Demand(1, 1, "guess"), None),
        (Demand(0, 0), "at most 0 calls"),
        (Demand(1, None, "stop"), 'call "stop"'),
    ],
)
def test_a_reply_that_does_not_meet_the_demand_is_text_and_not_valid(
    demand: Demand, problem: str | None
) -> None:
    one = tool_agent(CALL)

    async def script() -> None:
        reply = await one.ask(HELLO, tools=[GUESS], demand=demand)
        assert (len(reply.calls), reply.text) == ((1, None) if problem is None else (0, CALL))

    run(script())
    (turn,) = one.turns
    assert turn.valid == (problem is None) and (problem or "") in (turn.problem or "")


def test_a_changed_argument_begins_another_conversation() -> None:
    one = tool_agent(CALL, "Done.")

    async def script() -> None:
        first = await one.ask(HELLO, tools=[GUESS])
        changed = said("assistant", None, replace(first.calls[0], arguments='{"n": 5}'))
        await one.ask(
            HELLO, changed, said("tool", "no", call_id=changed.calls[0].id), tools=[GUESS]
        )

    run(script())
    assert [turn.call.parent for turn in one.turns if turn.call] == [-1, -1]
    one.check()


def test_results_are_sorted_by_their_calls_and_must_be_complete() -> None:
    one = tool_agent(CALL + "\n" + CALL, "Done.")

    async def script() -> None:
        first = await one.ask(HELLO, tools=[GUESS])
        a, b = (call.id for call in first.calls)
        two = said("tool", "of b", call_id=b), said("tool", "of a", call_id=a)
        await one.ask(HELLO, first.message, *two, tools=[GUESS])
        with pytest.raises(Refused, match="2 calls has 1 results"):
            await one.ask(HELLO, first.message, two[0], tools=[GUESS])

    run(script())
    assert one.turns[0].results == ("of a", "of b")


def test_a_call_that_cannot_be_read_is_text() -> None:
    one = tool_agent('<tool_call>\n{"name": }\n</tool_call>')

    async def script() -> None:
        reply = await one.ask(HELLO, tools=[GUESS])
        assert not reply.calls and reply.text is not None and reply.finish == "stop"

    run(script())
    assert not one.turns[0].valid


def test_a_stop_text_cuts_the_sampled_tokens_where_sampling_would_have_stopped() -> None:
    one = agent("Thought: go.\nObservation: I dream", "Next.")

    async def script() -> None:
        first = await one.ask(HELLO, stop=("Observation:",))
        assert (first.text, first.stop) == ("Thought: go.\n", "Observation:")
        back = said("assistant", "Thought: go.\nObservation:")
        await one.ask(HELLO, back, AGAIN)

    run(script())
    first, second = one.turns
    assert first.completion.text.rstrip().endswith("Observation:")
    assert "dream" not in first.completion.text
    assert second.call is not None and second.call.link == "with its stop text"
    one.check()


def test_the_budget_ends_in_a_fixed_reply_that_is_never_trained() -> None:
    one = agent("One.", calls=1)

    async def script() -> None:
        await one.ask(HELLO)
        for _ in range(MOST_STOPS):
            assert (await one.ask(HELLO)).text == STOP_TEXT
        with pytest.raises(Refused) as refused:
            await one.ask(HELLO)
        assert refused.value.status == 410

    run(script())
    turns, others = one.session.turns()
    assert len(turns) == 1
    assert [turn.call.role for turn in others if turn.call] == ["budget"] * MOST_STOPS


def test_after_its_tokens_an_episode_gets_the_fixed_reply() -> None:
    one = agent("One two three.", "Four five six.", tokens=5)

    async def script() -> None:
        await one.ask(HELLO)
        assert (await one.ask(HELLO)).text == STOP_TEXT

    run(script())
    assert [turn.completion.text for turn in one.turns] == ["One two three."]


def test_what_the_metrics_say_of_calls() -> None:
    one = agent("Once.", "Next.")

    async def script() -> None:
        for is_retry in (False, True, True):
            await one.ask(HELLO, body=b"x", is_retry=is_retry)
        await one.ask(AGAIN, ignored={"temperature": 0.2, "seed": 1, "no parameter": 1})

    run(script())
    assert [turn.info for turn in one.turns] == [
        {"retries": 2},
        {"ignored": ["seed", "temperature"]},
    ]


def test_a_prompt_without_room_is_refused_as_libraries_know_it() -> None:
    one = agent(max_length=80)

    async def script() -> None:
        with pytest.raises(Refused) as refused:
            await one.ask(said("user", "word " * 100))
        assert refused.value.code == "context_length_exceeded"

    run(script())
    assert one.session.is_full


def test_a_late_message_of_the_system_is_rendered() -> None:
    one = agent("Yes.", "No.")

    async def script() -> None:
        first = await one.ask(HELLO)
        await one.ask(HELLO, first.message, said("system", "Hurry."), AGAIN)

    run(script())
    prompt = one.turns[1].prompt.token_ids
    assert prompt is not None and "Hurry.\n\nAgain." in one.chat.spell(prompt)
    assert one.turns[1].call is not None and one.turns[1].call.parent == 0


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([said("system", "Alone.")], "has a message of the user"),
        ([HELLO, said("assistant", "And")], "ends with a reply"),
        ([HELLO, said("tool", "4", call_id="x")], "follows no call"),
        ([HELLO, said("assistant", "Hi."), said("tool", "4", call_id="x")], "follows no call"),
    ],
)
def test_a_conversation_that_no_template_can_write_is_refused(
    messages: list[ChatMessage], text: str
) -> None:
    one = agent()

    async def script() -> None:
        with pytest.raises(Refused, match=text):
            await one.ask(*messages)

    run(script())


@pytest.mark.parametrize("offered", [[], [GUESS]])
@pytest.mark.parametrize("template", sorted({*TOOL_TEMPLATES} - {"mistral"}))  # refuses it
def test_a_greeting_by_the_agent_is_in_the_prompt_once(
    template: str, offered: list[dict[str, object]]
) -> None:
    one = tool_agent("Yes.", template=template)
    system = said("system", "Be short.")

    async def script() -> None:
        await one.ask(system, said("assistant", "I greet you."), HELLO, tools=offered)

    run(script())
    ids = one.prompts[0].token_ids
    assert ids is not None
    text = one.chat.spell(ids)
    assert [text.count(part) for part in ("Be short.", "I greet you.", "Hello.")] == [1, 1, 1]


@pytest.mark.parametrize("offered", [[], [GUESS]])
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (None, '{"n": "\\ud800"}'),
        (None, '{"a":' * 64 + "1" + "}" * 64),
        ("<tool_call>{", '{"n": 4}'),
    ],
)
@pytest.mark.parametrize("template", ["hermes", "llama3", "mistral"])
def test_no_call_that_an_agent_writes_itself_ends_the_run(
    template: str, text: str | None, arguments: str, offered: list[dict[str, object]]
) -> None:
    one = tool_agent("Done.", template=template)
    own = said("assistant", text, ToolCall("x", "guess", arguments))

    async def script() -> None:
        with suppress(Refused):
            await one.ask(HELLO, own, said("tool", "4", call_id="x"), tools=offered)

    run(script())
    assert one.session.failure is None


def test_after_its_end_an_episode_answers_nothing() -> None:
    one = agent("One.")

    async def script() -> None:
        waiting = asyncio.ensure_future(one.ask(HELLO))
        await asyncio.sleep(0)
        one.session.close()
        for ask in (waiting, one.ask(HELLO)):
            with pytest.raises(Refused) as refused:
                await ask
            assert refused.value.status == 410

    run(script())
