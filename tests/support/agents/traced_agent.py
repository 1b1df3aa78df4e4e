"""`traced_agent.py FAMILY MODEL_URL`: a small agent that somebody else's library instruments.

It asks for the weather with a tool, and knows nothing of tracegrad. Where its spans go stands in
OpenTelemetry's own variables, as for any program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import openai
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

QUESTION = "What is the weather in Ulm?"
SYSTEM = "You know the weather."
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def weather(city: str) -> str:
    return f"Rain in {city}."


def openai_agent(client: openai.OpenAI, **more: Any) -> None:
    """With OpenAI's client; spans of the agent and of its tool are by hand."""
    tracer = trace.get_tracer("agent")
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    with tracer.start_as_current_span("agent", attributes=AGENT):
        while True:
            reply = _reply(client, messages, **more)
            messages.append(reply)
            calls = reply.get("tool_calls") or []
            if not calls:
                return
            for call in calls:
                with tracer.start_as_current_span("weather", attributes=TOOL_SPAN):
                    result = weather(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def _reply(client: openai.OpenAI, messages: list[Any], *, stream: bool = False) -> dict[str, Any]:
    wanted: dict[str, Any] = {
        "model": "mock",
        "messages": messages,
        "tools": [TOOL],
        "temperature": 0.5,
        "max_tokens": 500,
    }
    if not stream:
        answer = client.chat.completions.create(**wanted)
        message = answer.choices[0].message.model_dump(exclude_none=True)
        return {
            name: message[name] for name in ("role", "content", "tool_calls") if name in message
        }
    said, calls = "", dict[int, dict[str, Any]]()
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**wanted, stream=True, stream_options=options):
        for choice in chunk.choices:
            said += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                call = calls.setdefault(
                    piece.index,
                    {"type": "function", "id": "", "function": {"name": "", "arguments": ""}},
                )
                call["id"] += piece.id or ""
                call["function"]["name"] += piece.function.name or ""
                call["function"]["arguments"] += piece.function.arguments or ""
    message = {"role": "assistant", "content": said or None}
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def langchain_agent(model_url: str, **model: Any) -> None:
    """With LangChain's model, tool and chain."""
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_core.runnables import RunnableLambda
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    named = tool(weather, description="The weather of a city.")
    chat = ChatOpenAI(
        model="mock", base_url=model_url, api_key="none", temperature=0.5, max_tokens=500, **model
    ).bind_tools([named])

    def run(question: str) -> str:
        messages: list[Any] = [SystemMessage(SYSTEM), HumanMessage(question)]
        while True:
            reply = chat.invoke(messages)
            messages.append(reply)
            if not reply.tool_calls:
                return str(reply.content)
            messages += [named.invoke(call) for call in reply.tool_calls]

    config = {"configurable": {"thread_id": "th-1"}, "metadata": {"thread_id": "th-1"}}
    RunnableLambda(run, name="weather_agent").invoke(QUESTION, config)


def anthropic_agent(model_url: str) -> None:
    """With Anthropic's client."""
    import anthropic

    client = anthropic.Anthropic(base_url=model_url.removesuffix("/v1"), api_key="none")
    function = TOOL["function"]
    tools = [
        {
            "name": function["name"],
            "description": function["description"],
            "input_schema": function["parameters"],
        }
    ]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tracer = trace.get_tracer("agent")
    with tracer.start_as_current_span("agent", attributes=AGENT):
        while True:
            reply = client.messages.create(
                model="mock",
                system=SYSTEM,
                messages=messages,
                tools=tools,
                max_tokens=500,
            )
            messages.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                return
            results = []
            for call in calls:
                with tracer.start_as_current_span("weather", attributes=TOOL_SPAN):
                    result = weather(**call.input)
                told = {"type": "tool_result", "tool_use_id": call.id, "content": result}
                results.append(told)
            messages.append({"role": "user", "content": results})


AGENT: dict[str, str] = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "forecaster"}
TOOL_SPAN: dict[str, str] = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather"}


def _openinference(provider: TracerProvider) -> AbstractContextManager[Any]:
    from openinference.instrumentation import using_session
    from openinference.instrumentation.openai import OpenAIInstrumentor

    OpenAIInstrumentor().instrument(tracer_provider=provider)
    AGENT.update({"openinference.span.kind": "AGENT", "agent.name": "forecaster"})
    TOOL_SPAN["openinference.span.kind"] = "TOOL"
    return using_session("s-1")


def _alone(module: str, name: str) -> Callable[[TracerProvider], AbstractContextManager[Any]]:
    """An instrumentor that needs nothing but to be started."""

    def start(provider: TracerProvider) -> AbstractContextManager[Any]:
        getattr(import_module(module), name)().instrument(tracer_provider=provider)
        return nullcontext()

    return start


def _httpx(provider: TracerProvider) -> None:
    """The client's requests carry their trace, as where a program is instrumented throughout."""
    from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor

    HTTPXClientInstrumentor().instrument(tracer_provider=provider)


_OTEL = "opentelemetry.instrumentation"
FAMILIES: dict[str, Callable[[TracerProvider], AbstractContextManager[Any]]] = {
    "openinference": _openinference,
    "openinference-langchain": _alone(
        "openinference.instrumentation.langchain", "LangChainInstrumentor"
    ),
    "traceloop": _alone(f"{_OTEL}.openai", "OpenAIInstrumentor"),
    "traceloop-langchain": _alone(f"{_OTEL}.langchain", "LangchainInstrumentor"),
    "traceloop-anthropic": _alone(f"{_OTEL}.anthropic", "AnthropicInstrumentor"),
    "otel": _alone(f"{_OTEL}.genai.openai", "OpenAIInstrumentor"),
}


def main(names: str, model_url: str, *options: str) -> None:
    """`names`: families, joined by "+". Options: "stream", "httpx"."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    if "httpx" in options:
        _httpx(provider)
    families = names.split("+")
    contexts = [FAMILIES[family](provider) for family in families]
    stream = "stream" in options
    with contexts[0]:
        if families[0].endswith("langchain"):
            langchain_agent(model_url, streaming=stream, stream_usage=stream)
        elif families[0].endswith("anthropic"):
            anthropic_agent(model_url)
        else:
            openai_agent(openai.OpenAI(base_url=model_url, api_key="none"), stream=stream)
    provider.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
