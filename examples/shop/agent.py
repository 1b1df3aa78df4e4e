"""A shop assistant: answers one question with the help of the shop's tools."""

import json
import os
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI

from tracegrad import trace

from . import tasks

MODEL = "gpt-4.1-mini"
MAX_TURNS = 4

client = AsyncOpenAI(
    base_url=os.environ.get("TRACEGRAD_URL", "http://127.0.0.1:4141") + "/v1",
    api_key="not-needed",
)


def tool(name: str, description: str, kind: str, *parameters: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": kind} for parameter in parameters},
                "required": list(parameters),
            },
        },
    }


TOOLS = [
    tool("stock", "units on hand", "string", "item", "city"),
    tool("forecast", "units expected next month", "string", "item", "city"),
    tool("price", "price today", "string", "item", "city"),
    tool("list_price", "price in the catalogue", "string", "item", "city"),
    tool("multiply", "a times b", "integer", "a", "b"),
]

FUNCTIONS: dict[str, Callable[..., object]] = {
    "stock": lambda item, city: tasks.STOCK[item, city],
    "forecast": lambda item, city: tasks.FORECAST[item, city],
    "price": lambda item, city: tasks.PRICE[item, city],
    "list_price": lambda item, city: tasks.LIST_PRICE[item, city],
    "multiply": lambda a, b: int(a) * int(b),
}


def run_tool(name: str, arguments: str) -> str:
    """The result as the model gets to read it; a call that makes no sense gets an error."""
    try:
        return str(FUNCTIONS[name](**json.loads(arguments)))
    except (KeyError, TypeError, ValueError):
        return "error"


@trace
async def answer(question: str, temperature: float = 1.0) -> str | None:
    """The assistant's final words, or None if it is still calling tools after `MAX_TURNS`."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=TOOLS,  # type: ignore[arg-type]
            temperature=temperature,
            max_tokens=48,
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            if call.type == "function":
                result = run_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None
