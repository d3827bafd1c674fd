"""Loops of tools against a server of kvlathe, by the clients and agents that people use:
openai (chats, streamed chats, responses), anthropic, LangChain, pydantic-ai and OpenAI's
agents. Run by a Python that has them, with the server's address and the model's name.
Prints as JSON what each called its tool with, and said at the end.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import agents
import anthropic
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from pydantic_ai import Agent, ModelSettings, RunContext
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the weather in Bern?"
City = Literal["Bern", "Rome"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bern", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NAME, ABOUT = "get_weather", "The weather of a city."
TOKENS = 300
Loop = Callable[[str, str, list[str]], str]


def weather(city: str, called: list[str]) -> str:
    called.append(city)
    return f"It is 21 degrees and sunny in {city}."


def by_chats(url: str, model: str, called: list[str]) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    function = {"name": NAME, "description": ABOUT, "parameters": SCHEMA}
    tools: Any = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    ask: Any = {"model": model, "tools": tools, "temperature": 0, "max_tokens": TOKENS}
    first = client.chat.completions.create(
        messages=messages, tool_choice="required", **ask
    )
    message = first.choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        assert call.type == "function"
        said = weather(json.loads(call.function.arguments)["city"], called)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    last = client.chat.completions.create(messages=messages, tool_choice="none", **ask)
    return last.choices[0].message.content or ""


def by_streamed_chats(url: str, model: str, called: list[str]) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    function = {"name": NAME, "description": ABOUT, "parameters": SCHEMA}
    tools: Any = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    ask: Any = {"model": model, "tools": tools, "temperature": 0, "max_tokens": TOKENS}
    for choice in ("required", "none"):
        with client.chat.completions.stream(
            messages=messages, tool_choice=choice, **ask
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            said = weather(json.loads(call.function.arguments)["city"], called)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return messages[-1].content or ""


def by_responses(url: str, model: str, called: list[str]) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    function = {"name": NAME, "description": ABOUT, "parameters": SCHEMA}
    tools: Any = [{"type": "function", "strict": True, **function}]
    ask: Any = {"model": model, "temperature": 0, "max_output_tokens": TOKENS}
    first = client.responses.create(
        input=QUESTION, tools=tools, tool_choice="required", **ask
    )
    results: list[Any] = [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": weather(json.loads(item.arguments)["city"], called),
        }
        for item in first.output
        if item.type == "function_call"
    ]
    last = client.responses.create(
        input=results,
        previous_response_id=first.id,
        tools=tools,
        tool_choice="none",
        **ask,
    )
    return last.output_text


def by_messages(url: str, model: str, called: list[str]) -> str:
    client = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
    tools: Any = [{"name": NAME, "description": ABOUT, "input_schema": SCHEMA}]
    ask: Any = {"model": model, "max_tokens": TOKENS, "tools": tools}
    ask["extra_body"] = {"temperature": 0}  # its client has no such field any more
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.messages.create(messages=turns, tool_choice={"type": "any"}, **ask)
    assert first.stop_reason == "tool_use"
    results: list[Any] = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": weather(block.input["city"], called),
        }
        for block in first.content
        if block.type == "tool_use"
    ]
    turns += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    with client.messages.stream(
        messages=turns, tool_choice={"type": "none"}, **ask
    ) as stream:
        return stream.get_final_text()


def by_langchain(url: str, model: str, called: list[str]) -> str:
    def weather_of(city: City) -> str:
        """The weather of a city."""
        return weather(city, called)

    look: Any = tool(NAME)(weather_of)
    chat = ChatOpenAI(
        model=model,
        base_url=f"{url}/v1",
        api_key=SecretStr("x"),
        temperature=0,
        max_retries=0,
        max_completion_tokens=TOKENS,
    )
    bound = chat.bind_tools([look], tool_choice="required")
    asked = HumanMessage(QUESTION)
    first: Any = bound.invoke([asked])
    results = [
        ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"])
        for call in first.tool_calls
    ]
    last = chat.bind_tools([look], tool_choice="none").invoke([asked, first, *results])
    return str(last.content)


def by_pydantic_ai(url: str, model: str, called: list[str]) -> str:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="x")

    def settings(run: RunContext) -> ModelSettings:
        choice = "none" if called else "required"
        return ModelSettings(temperature=0, max_tokens=TOKENS, tool_choice=choice)

    chat = OpenAIChatModel(model, provider=provider)
    agent: Any = Agent(chat, model_settings=settings)

    def weather_of(city: City) -> str:
        """The weather of a city."""
        return weather(city, called)

    agent.tool_plain(name=NAME)(weather_of)
    return agent.run_sync(QUESTION).output


def by_agents(url: str, model: str, called: list[str]) -> str:
    agents.set_tracing_disabled(True)

    def weather_of(city: City) -> str:
        """The weather of a city."""
        return weather(city, called)

    look = agents.function_tool(weather_of, name_override=NAME)

    async def asked() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        settings = agents.ModelSettings(
            tool_choice="required", temperature=0, max_tokens=TOKENS
        )
        said: list[str] = []
        for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
            agent = agents.Agent(
                name="Weather",
                instructions="Answer questions about the weather.",
                model=kind(model, client),
                tools=[look],
                model_settings=settings,
            )
            # Once a tool was called, it asks without the choice.
            result = await agents.Runner.run(agent, QUESTION, max_turns=4)
            said.append(str(result.final_output))
        return said

    return min(asyncio.run(asked()), key=len)


LOOPS: dict[str, Loop] = {
    "openai chats": by_chats,
    "openai streamed chats": by_streamed_chats,
    "openai responses": by_responses,
    "anthropic messages": by_messages,
    "langchain": by_langchain,
    "pydantic_ai": by_pydantic_ai,
    "openai agents": by_agents,
}


def main(url: str, model: str) -> None:
    found: dict[str, Any] = {}
    for name, loop in LOOPS.items():
        called: list[str] = []
        found[name] = {"said": loop(url, model, called), "called": called}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
