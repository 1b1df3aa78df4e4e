"""Each framework's example, in a Python that has the framework: its calls are turns of the right
rollout, with tokens, joined as docs/frameworks.md says; its agents and tools are spans of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.engines.mock_engine import Answer
from support.frameworks.pythons import ROOT
from support.frameworks.run_example import EXAMPLES, run_example
from support.proxy.proxy_with_engine import ProxyWithEngine, assert_sampled
from support.proxy.servers import eventually
from tracegrad.events import Outcome

pytestmark = pytest.mark.timeout(900)  # the first run installs
ATTEMPTS = 2
ANSWER = "It rains in Ulm: rain."
CALL = Answer("", tool_calls=[("weather", '{"city": "Ulm"}')])


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """`on`: what is instrumented. `parents`: of each turn, the index of the one that it continues.
    `spans`: names that must be there. `children`: pairs of such names, child and parent. `inside`:
    of each turn, a span that it lies in. `reasons`: why turns are not trainable."""

    name: str
    on: Sequence[str]
    says: Sequence[Answer]
    parents: Sequence[int | None]
    spans: frozenset[str]
    children: Sequence[tuple[str, str]] = ()
    inside: Sequence[str] = ()
    dialect: str = "chat"
    reasons: frozenset[str | None] = frozenset([None])


def example(name: str, on: str, *spans: str, **more: object) -> Example:
    settings: dict[str, object] = {"says": (CALL, Answer(ANSWER)), "parents": (None, 0), **more}
    return Example(name=name, on=[on], spans=frozenset(spans), **settings)  # type: ignore[arg-type]


DSPY = Answer(
    f"[[ ## reasoning ## ]]\nI see.\n\n[[ ## answer ## ]]\n{ANSWER}\n\n[[ ## completed ## ]]"
)
FINAL = Answer("", tool_calls=[("final_answer", f'{{"answer": "{ANSWER}"}}')])

QUICK = [
    example(
        "openai_agents",
        "openai-agents",
        "forecaster",
        "weather",
        dialect="responses",
        inside=("forecaster",) * 2,
    ),
    example("pydantic_ai", "pydantic-ai", "invoke_agent forecaster", "execute_tool weather"),
]
OTHERS = [
    example(
        "langgraph",
        "langchain",
        "forecaster",
        "writer",
        "weather",
        says=(CALL, Answer(ANSWER), Answer(ANSWER)),
        parents=(None, 0, None),
        inside=("forecaster", "forecaster", "writer"),
    ),
    example(
        "smolagents",
        "smolagents",
        "forecaster.run",
        "SimpleTool",
        says=(CALL, FINAL),
        parents=(None, None),
    ),
    example(
        "crewai",
        "crewai",
        "forecaster._execute_core",
        "weather.run",
    ),
    example("dspy", "dspy", "ChainOfThought.forward", says=(DSPY,), parents=(None,)),
    example("strands", "strands", "invoke_agent forecaster", "execute_tool weather"),
    example(
        "agent_framework", "agent-framework", "invoke_agent forecaster", "execute_tool weather"
    ),
    example("llama_index", "llama-index", "FunctionAgent.run", "FunctionTool.acall"),
    example(
        "google_adk",
        "google-adk",
        "agent_run [forecaster]",
        "execute_tool weather",
        dialect="gemini",
    ),
    example("autogen", "autogen", "forecaster.on_messages_stream", "forecaster.weather"),
    example("ag2", "ag2", "invoke_agent forecaster", "execute_tool weather"),
    example("anthropic", "anthropic", "messages.create", dialect="messages"),
    example(
        "claude_agent",
        "claude-agent-sdk",
        "ClaudeAgentSDK.query",
        says=(
            Answer("", tool_calls=[("mcp__sky__weather", '{"city": "Ulm"}')]),
            Answer(ANSWER),
        ),
        dialect="messages",
    ),
    Example(
        name="mcp_tools",
        on=["openai-agents"],
        says=(CALL, Answer(ANSWER)),
        parents=(None, 0),
        spans=frozenset(["forecaster", "weather", "tools/call weather"]),
        children=[("tools/call weather", "weather")],
        dialect="responses",
    ),
]


def check(each: Example, proxy: ProxyWithEngine, home: Path) -> None:
    for _ in range(ATTEMPTS):
        proxy.engine.replies.extend(each.says)
    run = run_example(each.name, proxy, str(home))
    assert set(run.instrumented) == set(each.on), run.output
    rows = eventually(
        lambda: (
            len(found := [row for row in proxy.store.rollouts() if row.outcome]) == ATTEMPTS
            and found
        )
    )
    assert {(row.outcome, row.reward, row.agent) for row in rows} == {
        (Outcome.COMPLETED, 1.0, "solve")
    }
    assert len({row.task_id for row in rows}) == 1, "attempts at one task"
    assert len(proxy.engine.requests) == ATTEMPTS * len(each.says), "no call is left out"
    for row in rows:
        turns = proxy.turns_of(row.rollout_id)
        for turn, say in zip(turns, each.says, strict=True):
            assert_sampled(turn, say)
        ids = [turn.turn_id for turn in turns]
        parents = [ids.index(turn.parent_id) if turn.parent_id else None for turn in turns]
        assert parents == list(each.parents), [turn.fork_reason for turn in turns]
        assert {turn.dialect for turn in turns} == {each.dialect}
        assert {turn.untrainable for turn in turns} == each.reasons
        spans = proxy.store.spans(row.rollout_id)
        assert each.spans <= {span.name for span in spans}, sorted(span.name for span in spans)
        name_of = {span.span_id: span.name for span in spans}
        pairs = {(span.name, name_of.get(span.parent_span_id or "")) for span in spans}
        assert set(each.children) <= pairs, pairs
        scopes = proxy.store.turn_scopes([row.rollout_id])
        for turn, name in zip(turns, each.inside, strict=False):
            paths = scopes[turn.turn_id].span_paths
            assert any(path.endswith(f"/{name}") for path in paths), paths


@pytest.mark.frameworks
def test_dspys_cache_is_said(proxy: ProxyWithEngine, tmp_path: Path) -> None:
    cached = EXAMPLES / "dspy.py"
    edited = tmp_path / "dspy.py"
    edited.write_text(cached.read_text(encoding="utf-8").replace("cache=False", "cache=True"))
    proxy.engine.replies.append(DSPY)
    run = run_example("dspy", proxy, str(tmp_path), file=edited)
    assert len(proxy.engine.requests) == 1, "the second attempt has no call"
    assert "DSPy answered from its cache" in run.output
    assert "cache=False" in run.output


DSPYS_OWN_ENGINE = """
import dspy

from tracegrad import rollout

for questions in (["Ulm?"], ["Ulm?", "Bonn?"]):
    with rollout("weather") as r:
        # `api_base` chooses DSPy's own engine; its cache does not ask where an answer came from.
        model = dspy.LM("openai/policy", api_base=r.base_url, api_key=r.api_key, cache=True)
        for question in questions:
            model(question)
        r.reward(1.0)
"""


@pytest.mark.frameworks
def test_dspys_cache_is_said_of_its_own_engine(proxy: ProxyWithEngine, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(DSPYS_OWN_ENGINE)
    proxy.engine.replies.extend([Answer("Rain."), Answer("Sun.")])
    run = run_example("dspy", proxy, str(tmp_path), file=program)
    assert len(proxy.engine.requests) == 2, "the second rollout's first call was answered before"
    assert run.output.count("DSPy answered from its cache") == 1
    assert "cache=False" in run.output
    rows = eventually(
        lambda: len(found := [row for row in proxy.store.rollouts() if row.outcome]) == 2 and found
    )
    assert [len(proxy.turns_of(row.rollout_id)) for row in rows] == [1, 1]


# Settings that frameworks have, and that an ordinary program would leave alone: each is a trap's
# remedy. A line with one of them is one of ours. Which tools and system prompt an agent has is its
# own choice, also where a trap asks for it: Claude's `tools=[]` is no line of ours.
OURS = re.compile(
    r"tracegrad|TRACEGRAD|\binstrument\b|@trace|strict|cache|tool_choice|[Mm]iddleware|temperature"
    r"|stream_usage|reflect_on|max_tool_iterations|ATTRIBUTION|TELEMETRY|TRACING|NONESSENTIAL"
)


def without_ours(text: str) -> str:
    return re.sub(r"^.*  # \d\n", "", text, flags=re.M)


def test_each_example_numbers_its_lines_of_ours_and_has_a_test() -> None:
    files = {path.stem: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py")}
    server = files.pop("mcp_server")
    assert re.findall(r"^.*  # \d$", server, re.M) == ["import tracegrad  # 1"]
    assert OURS.findall(without_ours(server).split('"""', 2)[2]) == []
    assert set(files) == {each.name for each in (*QUICK, *OTHERS)}
    page = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    assert f"`make test` runs {len(QUICK)} of the {len(files)}," in " ".join(page.split())
    for name, text in files.items():
        body = text.split('"""', 2)[2]
        marks = [match[1] for match in re.finditer(r"  # (\d)$", body, re.M)]
        assert sorted(marks) == [str(i + 1) for i in range(len(marks))], name
        assert len(marks) in (2, 3), f"{name}: two lines, and at most one of a trap's remedy"
        ordinary = without_ours(body)
        ast.parse(ordinary)
        code = re.sub(r"^ *# .*\n", "", ordinary, flags=re.M)
        assert OURS.findall(code) == [], f"{name}: lines of ours without a number"


@pytest.mark.parametrize("each", QUICK, ids=lambda each: each.name)
def test_the_quick_ones(each: Example, proxy: ProxyWithEngine, tmp_path: Path) -> None:
    check(each, proxy, tmp_path)


@pytest.mark.frameworks
@pytest.mark.parametrize("each", OTHERS, ids=lambda each: each.name)
def test_the_others(each: Example, proxy: ProxyWithEngine, tmp_path: Path) -> None:
    check(each, proxy, tmp_path)
