"""Agents of real libraries, run by an interpreter that has them: `sdk_agents.py AGENT BASE_URL`.

Each plays the same: it asks with a tool and runs the calls that come back until a text comes, asks
again in the same conversation, and prints the last text.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

TASKS = ("Guess the number.", "Again.")
SYSTEM = "You play a game."
MODEL = "policy"
DESCRIPTION = "Guess a number."
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "why": {"type": "string"}},
    "required": ["n", "why"],
}


def guess(n: int, why: str) -> str:
    """Guess a number.

    Args:
        n: The number.
        why: The reason.
    """
    return f"{n} is too low"


def result(arguments: str) -> str:
    return guess(**json.loads(arguments))


def openai_chat(url: str, stream: bool = False, dump: bool = False) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="k")
    about = {"name": "guess", "description": DESCRIPTION, "parameters": PARAMETERS}
    tools: Any = [{"type": "function", "function": about}]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": tools}
    for task in TASKS:
        messages.append({"role": "user", "content": task})
        while True:
            if stream:
                with client.chat.completions.stream(**asked) as events:
                    answer: Any = events.get_final_completion()
            else:
                answer = client.chat.completions.create(**asked)
            message = answer.choices[0].message
            messages.append(message.model_dump() if dump else message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                content = result(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return str(message.content)


def openai_responses(url: str, stream: bool = False, previous: bool = False) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="k")
    about = {"name": "guess", "description": DESCRIPTION, "parameters": PARAMETERS}
    asked: dict[str, Any] = {"model": MODEL, "instructions": SYSTEM}
    asked["tools"] = [{"type": "function", **about}]
    items: list[Any] = []
    for task in TASKS:
        items.append({"role": "user", "content": task})
        while True:
            if stream:
                with client.responses.stream(input=items, **asked) as events:
                    answer: Any = events.get_final_response()
            else:
                answer = client.responses.create(input=items, **asked)
            if previous:
                asked["previous_response_id"], items = answer.id, []
            else:
                items += answer.output
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                about = {"call_id": call.call_id, "output": result(call.arguments)}
                items.append({"type": "function_call_output", **about})
    return str(answer.output_text)


def anthropic(url: str, stream: bool = False) -> str:
    from anthropic import Anthropic

    client = Anthropic(base_url=url.removesuffix("/v1"), api_key="k")
    tools = [{"name": "guess", "description": DESCRIPTION, "input_schema": PARAMETERS}]
    messages: list[Any] = []
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "system": SYSTEM, "tools": tools}
    for task in TASKS:
        messages.append({"role": "user", "content": task})
        while True:
            if stream:
                with client.messages.stream(messages=messages, **asked) as events:
                    answer: Any = events.get_final_message()
            else:
                answer = client.messages.create(messages=messages, **asked)
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": guess(**call.input)}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
    return "".join(block.text for block in answer.content)


def openai_agents(url: str, chat: bool = False, stream: bool = False) -> str:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="k")
    make = agents.OpenAIChatCompletionsModel if chat else agents.OpenAIResponsesModel
    agent = agents.Agent(
        name="player",
        instructions=SYSTEM,
        tools=[agents.function_tool(guess)],
        model=make(model=MODEL, openai_client=client),
    )

    async def play() -> str:
        items: list[Any] = []
        for task in TASKS:
            asked = [*items, {"role": "user", "content": task}]
            if stream:
                run: Any = agents.Runner.run_streamed(agent, asked)
                async for _ in run.stream_events():
                    pass
            else:
                run = await agents.Runner.run(agent, asked)
            items = run.to_input_list()
        return str(run.final_output)

    return asyncio.run(play())


def langgraph(url: str, stream: bool = False, responses: bool = False) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(
        model=MODEL, base_url=url, api_key="k", streaming=stream, use_responses_api=responses
    )
    agent = create_react_agent(model, [guess], prompt=SYSTEM)
    messages: list[Any] = []
    for task in TASKS:
        messages = agent.invoke({"messages": [*messages, ("user", task)]})["messages"]
    return str(messages[-1].text)


def pydantic_ai(url: str, dialect: str = "chat") -> str:
    from pydantic_ai import Agent

    model: Any
    if dialect == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        base = url.removesuffix("/v1")
        model = AnthropicModel(MODEL, provider=AnthropicProvider(api_key="k", base_url=base))
    else:
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        make: Any = OpenAIChatModel if dialect == "chat" else OpenAIResponsesModel
        model = make(MODEL, provider=OpenAIProvider(base_url=url, api_key="k"))
    agent = Agent(model, instructions=SYSTEM, tools=[guess])
    history: list[Any] = []
    for task in TASKS:
        run = agent.run_sync(task, message_history=history)
        history = run.all_messages()
    return str(run.output)


def smolagents(url: str, code: bool = False) -> str:
    from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(model_id=MODEL, api_base=url, api_key="k")
    make: Any = CodeAgent if code else ToolCallingAgent
    agent = make(tools=[tool(guess)], model=model, max_steps=3, verbosity_level=0)
    return str(agent.run(TASKS[0]))


AGENTS: dict[str, Callable[[str], str]] = {
    "openai-chat": openai_chat,
    "openai-chat-dumped": partial(openai_chat, dump=True),
    "openai-chat-streamed": partial(openai_chat, stream=True),
    "openai-responses": openai_responses,
    "openai-responses-streamed": partial(openai_responses, stream=True),
    "openai-responses-previous": partial(openai_responses, previous=True),
    "anthropic": anthropic,
    "anthropic-streamed": partial(anthropic, stream=True),
    "openai-agents": openai_agents,
    "openai-agents-streamed": partial(openai_agents, stream=True),
    "openai-agents-chat": partial(openai_agents, chat=True),
    "openai-agents-chat-streamed": partial(openai_agents, chat=True, stream=True),
    "langgraph": langgraph,
    "langgraph-streamed": partial(langgraph, stream=True),
    "langgraph-responses": partial(langgraph, responses=True),
    "langgraph-responses-streamed": partial(langgraph, responses=True, stream=True),
    "pydantic-ai": pydantic_ai,
    "pydantic-ai-responses": partial(pydantic_ai, dialect="responses"),
    "pydantic-ai-anthropic": partial(pydantic_ai, dialect="anthropic"),
    "smolagents-tools": smolagents,
    "smolagents-code": partial(smolagents, code=True),
}

if __name__ == "__main__":
    sys.stdout.write(AGENTS[sys.argv[1]](sys.argv[2]))
