"""LangChain's ChatOpenAI and pydantic-ai against a server of kvlathe: run by a Python
that has them, with the server's address. Prints what came of each as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic_ai import Agent, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the weather in Bern?"


class Weather(BaseModel):
    """The weather in a place."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=8)
    sky: Literal["clear", "cloudy"]


def look(city: Literal["Bern", "Rome"]) -> str:
    """Look at the sky of a city."""
    return f"clear in {city}"


LOOK: Any = tool(look)


def langchain(url: str) -> dict[str, Any]:
    model = ChatOpenAI(
        model="lathe-5m", base_url=url, api_key=SecretStr("x"), seed=1, max_retries=0
    )
    by_schema = model.with_structured_output(Weather, method="json_schema")
    by_call = model.with_structured_output(Weather, method="function_calling")
    bound = model.bind_tools([LOOK], tool_choice="required", parallel_tool_calls=False)
    asked = HumanMessage(QUESTION)
    first: Any = bound.invoke([asked])
    [call] = first.tool_calls
    result = ToolMessage(LOOK.invoke(call["args"]), tool_call_id=call["id"])
    then = model.bind(max_tokens=4).invoke([asked, first, result])
    streamed: Any = None
    for chunk in bound.stream([asked]):
        streamed = chunk if streamed is None else streamed + chunk
    found: list[Any] = [by_schema.invoke(QUESTION), by_call.invoke(QUESTION)]
    return {
        "schema": found[0].model_dump(),
        "call": found[1].model_dump(),
        "tool": call["args"],
        "streamed": [one["args"] for one in streamed.tool_calls],
        "then": isinstance(then, AIMessage),
    }


async def pydantic_ai(url: str) -> dict[str, Any]:
    provider = OpenAIProvider(base_url=url, api_key="x")
    model = OpenAIChatModel("lathe-5m", provider=provider)
    agent = Agent(model, output_type=ToolOutput(Weather), model_settings={"seed": 3})
    found = await agent.run(QUESTION)
    async with agent.run_stream(QUESTION) as stream:
        last = await stream.get_output()
    return {"output": found.output.model_dump(), "streamed": last.model_dump()}


if __name__ == "__main__":
    address = sys.argv[1]
    print(
        json.dumps(
            {
                "langchain": langchain(address),
                "pydantic_ai": asyncio.run(pydantic_ai(address)),
            }
        )
    )
