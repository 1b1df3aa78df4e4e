"""The agent frameworks that are known here: what is instrumented in each, by whom, and which of
their habits keep turns from being trained. The one list: `tracegrad.instrument()` works by it,
`tracegrad rollouts explain` quotes it, and docs/frameworks.md is held against it by a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Trap:
    """What a framework or a CLI agent does unless it is told otherwise, and what to do about it.

    `reason`: why turns are not trained because of it, in the store's words; None: for another
    cause, or they are.
    """

    what: str
    remedy: str
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a framework sends to its vendor unless it is told otherwise.

    Attributes:
        what: in a word or two.
        remedy: what to do about it, as the warning says it.
        unless: variables that keep it from it, and the values that do, in lower case. Any other
            value (`false`, `0`) leaves it on.
    """

    what: str
    remedy: str
    unless: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework, or one vendor's client.

    Attributes:
        name: what `instrument()` takes and returns.
        title: as its makers write it.
        packages: any of these distributions is the framework.
        modules: of what they install; where any of these is imported, the framework is in use.
        aliases: other names that `instrument()` takes for it.
        instrumentors: distributions that hold an instrumentor for it (entry points of the group
            `opentelemetry_instrumentor`); of several that are installed the first one is taken.
        native: it makes spans of OpenTelemetry itself, and no instrumentor is needed.
        native_from: the major version from which it does, and instrumentors are left alone; 0: an
            instrumentor that is installed goes before.
        needs_global: its own spans go to the process's tracer provider, and to no other.
        is_addon: it carries the context of spans to other processes, where its servers make some.
            It is turned on beside what makes spans, and is not among the names that are returned.
        is_client: it calls models and has no agents. Its spans would only repeat what the proxy
            records, so it is left alone beside a framework, unless it is named.
        silenced_by: variables that turn its spans off, and the values that do, in lower case.
        reports: what it sends to its vendor.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    modules: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    instrumentors: tuple[str, ...] = ()
    native: bool = False
    native_from: int = 0
    needs_global: bool = False
    is_addon: bool = False
    is_client: bool = False
    silenced_by: tuple[tuple[str, tuple[str, ...]], ...] = ()
    reports: tuple[Report, ...] = ()
    traps: tuple[Trap, ...] = field(default=())


_TRUE, _YES = ("1", "true"), ("1", "true", "yes", "on")

FREE_SAMPLING = "TRACEGRAD_PROXY_SAMPLING=free"
FRAMEWORKS: tuple[Framework, ...] = (
    Framework(
        name="langchain",
        title="LangChain and LangGraph",
        packages=("langchain-core",),
        modules=("langchain_core",),
        aliases=("langgraph",),
        instrumentors=(
            "openinference-instrumentation-langchain",
            "opentelemetry-instrumentation-genai-langchain",
            "opentelemetry-instrumentation-langchain",
        ),
        traps=(
            Trap("Reasoning is not sent back to the model.", "None: it forks where it is trained."),
            Trap(
                "`stream_usage` is off for any server but OpenAI's.",
                "None: the proxy counts tokens by their ids, and asks the engine for a stream's"
                " usage only where the client does (a model behind LiteLLM tells no ids, and has no"
                " count without it). `ChatOpenAI(stream_usage=True)`, if your program reads it.",
            ),
        ),
    ),
    Framework(
        name="openai-agents",
        title="OpenAI Agents SDK",
        packages=("openai-agents",),
        modules=("agents",),
        instrumentors=(
            "openinference-instrumentation-openai-agents",
            "opentelemetry-instrumentation-genai-openai-agents",
        ),
        silenced_by=(("OPENAI_AGENTS_DISABLE_TRACING", _TRUE),),
        reports=(
            Report(
                what="its traces",
                remedy="pip install openinference-instrumentation-openai-agents, which takes that"
                " exporter away, or set OPENAI_AGENTS_DISABLE_TRACING=1, which turns its spans off"
                " too",
                unless=(("OPENAI_AGENTS_DISABLE_TRACING", _TRUE),),
            ),
        ),
        traps=(
            Trap(
                "Tools are strict.",
                f"`@function_tool(strict_mode=False)`, or `{FREE_SAMPLING}`.",
                "constrained",
            ),
            Trap(
                "An `output_type` is a response format.",
                "Parse the answer yourself, where its turns are to be trained.",
                "constrained",
            ),
            Trap(
                "It reports traces to its vendor.",
                "OpenInference's instrumentor takes that exporter away. Without it:"
                " `OPENAI_AGENTS_DISABLE_TRACING=1`, which turns its spans off altogether.",
            ),
        ),
    ),
    Framework(
        name="pydantic-ai",
        title="Pydantic AI",
        packages=("pydantic-ai-slim", "pydantic-ai"),
        modules=("pydantic_ai",),
        native=True,
        traps=(
            Trap(
                "Tools are strict.",
                f"`Tool(f, strict=False)`, or `{FREE_SAMPLING}`.",
                "constrained",
            ),
            Trap(
                "An `output_type` is a tool that must be called, or a response format.",
                f"`{FREE_SAMPLING}` leaves the tool to the model. For a response format: parse the"
                " answer yourself, where its turns are to be trained.",
                "constrained",
            ),
        ),
    ),
    Framework(
        name="crewai",
        title="CrewAI",
        packages=("crewai",),
        modules=("crewai",),
        instrumentors=(
            "openinference-instrumentation-crewai",
            "opentelemetry-instrumentation-crewai",
        ),
        reports=(
            Report(
                what="telemetry",
                remedy="set CREWAI_DISABLE_TELEMETRY=true before it is imported",
                unless=(
                    ("CREWAI_DISABLE_TELEMETRY", _YES),
                    ("CREWAI_DISABLE_TRACKING", _YES),
                    ("OTEL_SDK_DISABLED", _YES),
                ),
            ),
            Report(
                what="the traces of runs, once that was agreed to,",
                remedy="set CREWAI_TRACING_ENABLED=false",
                unless=(("CREWAI_TRACING_ENABLED", ("0", "false")),),
            ),
        ),
        traps=(
            Trap("Tools are strict.", f"`{FREE_SAMPLING}`.", "constrained"),
            Trap(
                "It reports to its vendor.",
                "`CREWAI_DISABLE_TELEMETRY=true`, before it is imported.",
            ),
            Trap(
                "It collects a trace of its first run, asks in a terminal whether to send it, and"
                " sends those of later runs if that was agreed to.",
                "`CREWAI_TRACING_ENABLED=false`.",
            ),
            Trap(
                "A model that it does not know it wants LiteLLM for.",
                "Give `LLM` a `base_url`.",
            ),
        ),
    ),
    Framework(
        name="smolagents",
        title="smolagents",
        packages=("smolagents",),
        modules=("smolagents",),
        instrumentors=(
            "openinference-instrumentation-smolagents",
            "opentelemetry-instrumentation-genai-smolagents",
        ),
        traps=(
            Trap(
                "`ToolCallingAgent` asks for `tool_choice=required`.",
                f'`{FREE_SAMPLING}`, or `OpenAIModel(…, tool_choice="auto")`; `CodeAgent` asks for'
                " none.",
                "constrained",
            ),
            Trap(
                "It writes calls and results into later prompts as text.",
                "None: such turns fork.",
            ),
        ),
    ),
    Framework(
        name="dspy",
        title="DSPy",
        packages=("dspy", "dspy-ai"),
        modules=("dspy",),
        instrumentors=(
            "openinference-instrumentation-dspy",
            "opentelemetry-instrumentation-genai-dspy",
        ),
        traps=(
            Trap(
                "Its cache, in memory and on the disk, answers what was asked before, whatever the"
                " `api_base`: equal attempts get one answer.",
                "`dspy.LM(…, cache=False)`.",
            ),
            Trap(
                "`api_base=` takes an engine of its own on raw sockets.",
                "Leave it out and set `OPENAI_BASE_URL`, or give it `r.base_url`.",
            ),
        ),
    ),
    Framework(
        name="strands",
        title="Strands Agents",
        packages=("strands-agents",),
        modules=("strands",),
        native=True,
        needs_global=True,
    ),
    Framework(
        name="agent-framework",
        title="Microsoft Agent Framework",
        packages=("agent-framework-core", "agent-framework"),
        modules=("agent_framework",),
        native=True,
        needs_global=True,
    ),
    Framework(
        name="llama-index",
        title="LlamaIndex",
        packages=("llama-index-core",),
        modules=("llama_index.core",),
        instrumentors=(
            "openinference-instrumentation-llama-index",
            "opentelemetry-instrumentation-genai-llama-index",
        ),
        traps=(
            Trap("The temperature is 0.1.", f"`temperature=1.0`, or `{FREE_SAMPLING}`."),
            Trap(
                "`ReActAgent` spells arguments anew.",
                "`FunctionAgent`; turns of the other fork.",
            ),
        ),
    ),
    Framework(
        name="google-adk",
        title="Google ADK",
        packages=("google-adk",),
        modules=("google.adk",),
        instrumentors=("openinference-instrumentation-google-adk",),
        native=True,
        needs_global=True,
    ),
    Framework(
        name="autogen",
        title="AutoGen",
        packages=("autogen-agentchat",),
        modules=("autogen_agentchat",),
        instrumentors=("openinference-instrumentation-autogen-agentchat",),
        traps=(
            Trap(
                "`reflect_on_tool_use=True` leaves the tools out of its second call, which forks"
                " (`tools_changed`).",
                "`max_tool_iterations=…` in its place.",
            ),
        ),
    ),
    Framework(
        name="ag2",
        title="AG2",
        packages=("ag2",),
        modules=("ag2", "autogen"),
        instrumentors=("openinference-instrumentation-ag2",),
        native=True,
        native_from=1,
        needs_global=True,
        traps=(
            Trap(
                "From 1.0 on only agents that have AG2's own `TelemetryMiddleware` make spans.",
                "None: those that are made from then on are handed it, unless they have one.",
            ),
        ),
    ),
    Framework(
        name="claude-agent-sdk",
        title="Claude Agent SDK",
        packages=("claude-agent-sdk",),
        modules=("claude_agent_sdk",),
        instrumentors=("openinference-instrumentation-claude-agent-sdk",),
        reports=(
            Report(
                what="telemetry",
                remedy="set CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
                unless=(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", _YES),),
            ),
        ),
        traps=(
            Trap(
                "The CLI is a process of its own.",
                "`@trace(environ=True)`: it inherits the environment.",
            ),
            Trap("It reports to its vendor.", "`CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1`."),
            Trap(
                "A line about the session in its system prompt changes between calls.",
                "None: the proxy takes it out, as vLLM does.",
            ),
            Trap(
                "`from claude_agent_sdk import query` before it is instrumented keeps the function"
                " without spans.",
                "Import tracegrad first, or call `claude_agent_sdk.query(…)`.",
            ),
            Trap(
                "Its first prompt holds 40 KB or more.",
                "`tools=[…]`, and no `system_prompt` of Claude Code's.",
            ),
        ),
    ),
    Framework(
        name="mcp",
        title="MCP",
        packages=("mcp",),
        modules=("mcp",),
        instrumentors=("openinference-instrumentation-mcp",),
        native=True,
        native_from=2,
        is_addon=True,
    ),
    Framework(
        name="anthropic",
        title="Anthropic SDK",
        packages=("anthropic",),
        modules=("anthropic",),
        instrumentors=(
            "openinference-instrumentation-anthropic",
            "opentelemetry-instrumentation-genai-anthropic",
            "opentelemetry-instrumentation-anthropic",
        ),
        is_client=True,
    ),
    Framework(
        name="openai",
        title="OpenAI SDK",
        packages=("openai",),
        modules=("openai",),
        instrumentors=(
            "openinference-instrumentation-openai",
            "opentelemetry-instrumentation-genai-openai",
            "opentelemetry-instrumentation-openai-v2",
            "opentelemetry-instrumentation-openai",
        ),
        is_client=True,
    ),
)


def by_name() -> dict[str, Framework]:
    """By the names and aliases that `instrument()` takes."""
    return {name: each for each in FRAMEWORKS for name in (each.name, *each.aliases)}


def causes_of(reason: str) -> Iterator[tuple[Framework, Trap]]:
    """Which frameworks' habits make turns untrainable for this reason."""
    for framework in FRAMEWORKS:
        yield from ((framework, trap) for trap in framework.traps if trap.reason == reason)
