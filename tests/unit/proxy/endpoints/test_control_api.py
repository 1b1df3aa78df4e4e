"""Events and spans: what the SDK sends apart from LLM calls."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Status, StatusCode, Tracer

from support.proxy.proxy_with_engine import ProxyWithEngine
from support.store.events import rollout_events
from tracegrad.events import Outcome
from tracegrad.inspect.reasons import untrained_reason
from tracegrad.store import Ledger, StepRecord, Store, lease_by_rollout

Events = list[dict[str, object]]


def send(http: httpx.Client, events: Events) -> httpx.Response:
    return http.post("/api/events", json={"events": events})


def test_posted_events_are_stored(rig: ProxyWithEngine) -> None:
    answer = send(
        rig.http,
        [
            {
                "type": "rollout_started",
                "rollout_id": "r1",
                "task_id": "t1",
                "agent": "shop",
                "tags": {"split": "train"},
                "task": {"question": "How many?"},
                "opened_at": 100.5,
            },
            {"type": "reward", "rollout_id": "r1", "reward_id": "w1", "value": 1},
            {"type": "reward", "rollout_id": "r1", "value": 0.5, "turn": -1, "name": "format"},
            {
                "type": "rollout_finished",
                "rollout_id": "r1",
                "outcome": "agent_error",
                "error": "KeyError: 'x'",
            },
        ],
    )
    accepted = {"accepted": 4, "calls": [{"rollout_id": "r1", "calls": 0}]}
    assert (answer.status_code, answer.json()) == (200, accepted)
    [row] = rig.store.rollouts()
    assert (row.rollout_id, row.task_id, row.agent) == ("r1", "t1", "shop")
    assert row.outcome == Outcome.AGENT_ERROR
    assert dict(row.tags) == {"split": "train"}
    rewards = rig.store.rewards("r1")
    assert [(r.name, r.value, r.turn, r.source) for r in rewards] == [
        ("reward", 1.0, None, "open"),
        ("format", 0.5, -1, "open"),
    ]
    assert rewards[0].reward_id == "w1"


def test_a_rollout_is_held_out_where_its_opening_says_so(rig: ProxyWithEngine) -> None:
    opened = {"type": "rollout_started", "task_id": "t"}
    marked = {**opened, "rollout_id": "eval", "held_out": True}
    assert send(rig.http, [{**opened, "rollout_id": "r"}, marked]).status_code == 200
    assert {row.rollout_id: row.held_out for row in rig.store.rollouts()} == {
        "r": False,
        "eval": True,
    }
    answer = send(rig.http, [{**marked, "held_out": "perhaps"}])
    assert (answer.status_code, "held_out" in answer.text) == (422, True)


AGENTS_PAGE = Path(__file__).parents[4] / "docs" / "agents.md"


def test_the_recipe_by_http_makes_a_group_and_without_its_first_half_none(
    rig: ProxyWithEngine,
) -> None:
    opening, ending = re.findall(r"```json\n(.*?)\n```", AGENTS_PAGE.read_text(), re.DOTALL)[:2]

    def attempt(name: str, *, opened: bool) -> None:
        def post(recipe: str) -> None:
            body = json.loads(recipe.replace("attempt-1", name))
            rig.http.post("/api/events", json=body).raise_for_status()

        if opened:
            post(opening)
        chat = f"/rollouts/{name}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "hi"}]}
        rig.http.post(chat, json=body).raise_for_status()
        post(ending)

    attempt("attempt-1", opened=True)
    attempt("attempt-2", opened=True)
    attempt("attempt-3", opened=False)
    ready = Ledger(rig.store).preview(groups=9, group_size=2, tags={}, incomplete_after_s=0.0)
    [group] = ready.groups
    assert group.group_id == "fix-the-bug"
    assert {each.rollout_id for each in group.rollouts} == {"attempt-1", "attempt-2"}
    alone = rig.store.rollout("attempt-3")
    assert untrained_reason(alone.turns[0], alone) == ("no_task", False)
    old = json.loads(opening.replace("rollout_started", "rollout_opened"))
    assert rig.http.post("/api/events", json=old).status_code == 200, "its name before 0.1"


@pytest.mark.parametrize("word", ["span", "span_ended"])  # the second: in journals of older SDKs
def test_a_span_that_could_not_leave_by_otlp_comes_as_an_event(
    rig: ProxyWithEngine, word: str
) -> None:
    started = "rollout_started" if word == "span" else "rollout_opened"
    assert send(rig.http, [{"type": started, "rollout_id": "r1"}]).status_code == 200
    span = {"type": word, "rollout_id": "r1", "trace_id": "a" * 32, "span_id": "b" * 16}
    answer = send(rig.http, [span | {"name": "solve", "start_ns": 1, "end_ns": 2, "status": "ok"}])
    assert answer.status_code == 200, answer.text
    [kept] = rig.store.spans("r1")
    assert (kept.name, kept.span_id, kept.status) == ("solve", "b" * 16, "ok")
    assert send(rig.http, [span | {"name": "solve", "start_ns": 1}]).status_code == 422


def test_a_reward_for_a_rollout_that_nobody_knows_is_kept_and_answered_as_such(
    rig: ProxyWithEngine,
) -> None:
    reward = {"type": "reward", "rollout_id": "typo", "value": 1.0}
    answer = send(rig.http, [{"type": "rollout_started", "rollout_id": "r1"}, reward])
    assert answer.json() == {"accepted": 2, "unknown_rollouts": ["typo"]}
    assert send(rig.http, [reward]).json() == {"accepted": 1, "unknown_rollouts": ["typo"]}
    assert len(rig.store.rewards("typo")) == 2, "it may come before its rollout's opening"
    opened = {"type": "rollout_started", "rollout_id": "typo", "task_id": "t"}
    assert send(rig.http, [opened]).json() == {"accepted": 1}
    assert send(rig.http, [reward]).json() == {"accepted": 1}
    [row] = [each for each in rig.store.rollouts() if each.rollout_id == "typo"]
    assert (row.reward, row.task_id) == (1.0, "t")


def test_a_reward_and_the_opening_in_one_batch_are_known_in_either_order(
    rig: ProxyWithEngine,
) -> None:
    reward = {"type": "reward", "rollout_id": "r1", "value": 1.0}
    opened = {"type": "rollout_started", "rollout_id": "r1"}
    assert send(rig.http, [reward, opened]).json() == {"accepted": 2}


@pytest.mark.parametrize("at", [0, 1e12, 1.7e308])
def test_an_end_may_state_any_time(rig: ProxyWithEngine, at: float) -> None:
    ended = {"type": "rollout_finished", "rollout_id": "r1", "finished_at": at}
    found = send(rig.http, [ended]).json()
    assert found["calls"] == [{"rollout_id": "r1", "calls": 0}]


def test_a_reward_that_came_after_training_is_kept_and_answered_as_such(
    rig: ProxyWithEngine,
) -> None:
    for name in ("r1", "r2", "r3"):
        rig.store.append(rollout_events(name, task=name))
    ledger = Ledger(rig.store)
    reward = {"type": "reward", "value": 0.5}
    rewards: Events = [{**reward, "rollout_id": name} for name in ("r1", "r2", "r3", "r1")]
    assert send(rig.http, rewards).json() == {"accepted": 4}
    groups = ledger.lease(groups=2, group_size=1, owner="o", ttl_s=600)
    leased = [{"rollout_id": name, "state": "leased"} for name in ("r1", "r2")]
    assert send(rig.http, rewards).json() == {"accepted": 4, "after_training": leased}
    first, second = ([turn.turn_id for turn in group.rollouts[0].turns] for group in groups)
    record = StepRecord(step=7, version=7, checkpoint="c")
    leases = lease_by_rollout(groups[:1])
    ledger.commit_step(record, trained=first, skipped={}, rollouts=["r1"], leases=leases)
    skipped = dict.fromkeys(second, "stale")
    ledger.commit_skipped(skipped, ["r2"], lease_by_rollout(groups[1:]))
    assert send(rig.http, rewards).json()["after_training"] == [
        {"rollout_id": "r1", "state": "trained", "step": 7},
        {"rollout_id": "r2", "state": "skipped"},
    ]
    [again] = rig.store.rewards("r1")[:1]
    retried = {**reward, "rollout_id": "r1", "reward_id": again.reward_id}
    assert send(rig.http, [retried]).json() == {"accepted": 1}, "it had come in time"
    found = rig.store.late_rewards()
    assert (found.rewards, found.rollouts) == (6, 2)
    assert rig.store.late_rewards(after=found.last).rewards == 0
    detail = rig.store.rollout("r1")
    assert [detail.came_late(each) for each in detail.rewards] == [False] * 3 + [True] * 4


def test_events_are_idempotent(rig: ProxyWithEngine) -> None:
    event: Events = [{"type": "reward", "rollout_id": "r", "reward_id": "w", "value": 1.0}]
    assert send(rig.http, event).status_code == send(rig.http, event).status_code == 200
    assert len(rig.store.rewards("r")) == 1


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"type": "reward", "rollout_id": "r1"}, "events[1].value"),
        ({"type": "reward", "rollout_id": "r1", "value": "much"}, "events[1].value"),
        ({"type": "reward", "value": 1.0}, "events[1].rollout_id"),
        ({"type": "reward", "rollout_id": "a b", "value": 1.0}, "events[1].rollout_id"),
        ({"type": "reward", "rollout_id": "r1", "value": 1, "rewrad": 2}, "events[1].rewrad"),
        ({"type": "rollout_finished", "rollout_id": "r1", "outcome": "won"}, "events[1].outcome"),
        ({"type": "rollout_started", "rollout_id": "r", "tags": {"a": 1}}, "events[1].tags.a"),
        ({"type": "applause", "rollout_id": "r1"}, "events[1]"),
        ({"rollout_id": "r1"}, "events[1]"),
    ],
)
def test_a_bad_event_is_named_and_nothing_of_its_batch_stored(
    rig: ProxyWithEngine, bad: dict[str, object], param: str
) -> None:
    answer = send(rig.http, [{"type": "rollout_started", "rollout_id": "r1"}, bad])
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"].startswith(param)
    assert rig.store.rollouts() == []


def test_a_body_that_is_no_json_is_said_to_be_none(rig: ProxyWithEngine) -> None:
    answer = rig.http.post(
        "/api/events", content="{bad", headers={"content-type": "application/json"}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (422, None)
    assert error["message"].startswith("the body is no JSON: ")
    assert error["message"].endswith(" at character 1")


def test_a_refusal_is_in_our_words_alone(rig: ProxyWithEngine) -> None:
    answer = rig.http.post("/api/feedback", json={"thumbs": "up"})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == "give one of rollout_id and response_id"


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "1e308", "1000000.5", "-1e7"]
)
def test_rewards_are_bounded(rig: ProxyWithEngine, value: str) -> None:
    event = f'{{"type": "reward", "rollout_id": "r1", "value": {value}}}'
    answer = rig.http.post(
        "/api/events",
        content=f'{{"events": [{event}]}}',
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["param"] == "events[0].value"
    assert "finite number" in error["message"] or "1000000" in error["message"]
    assert rig.store.rollouts() == []


def test_a_full_store_is_a_503(rig: ProxyWithEngine) -> None:
    rig.writer.broken = True
    answer = send(rig.http, [{"type": "rollout_started", "rollout_id": "r1"}])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "disk is full" in answer.json()["error"]["message"]


def test_the_api_describes_itself(rig: ProxyWithEngine) -> None:
    paths = rig.http.get("/openapi.json").json()["paths"]
    assert {path for path in paths if path.startswith("/api")} == {
        "/api/anchors/next",
        "/api/events",
        "/api/feedback",
        "/api/intake",
        "/api/push",
        "/api/push/hold",
        "/api/tasks/check",
        "/api/push/version",
        "/api/push/release",
        "/api/push/canary",
        "/api/push/upstreams",
        "/api/rollouts/{rollout_id}/keys",
    }


# Spans, sent by OpenTelemetry's own exporter


@pytest.fixture
def tracer(proxy: str) -> Iterator[Callable[..., Tracer]]:
    providers = []

    def make(resource: dict[str, str] | None = None, *, gzipped: bool = False) -> Tracer:
        exporter = OTLPSpanExporter(
            f"{proxy}/v1/traces", compression=Compression.Gzip if gzipped else None, timeout=5
        )
        provider = TracerProvider(resource=Resource(resource or {}))
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        providers.append(provider)
        return provider.get_tracer("tests")

    yield make
    for provider in providers:
        provider.shutdown()


@pytest.mark.parametrize("gzipped", [False, True])
def test_spans_of_the_real_exporter_land_in_the_store(
    tracer: Callable[..., Tracer], store: Store, gzipped: bool
) -> None:
    work = tracer(gzipped=gzipped)
    named = {"tracegrad.rollout": "r1"}
    with (
        work.start_as_current_span("agent", attributes=named) as outer,
        work.start_as_current_span("tool") as inner,
    ):
        inner.set_attributes({**named, "ok": True, "n": 3, "x": 0.5, "many": ["a", "b"]})
        inner.set_status(Status(StatusCode.ERROR, "broke"))
    tool, agent = sorted(store.spans("r1"), key=lambda span: span.end_ns)
    context = outer.get_span_context()
    assert agent.trace_id == tool.trace_id == f"{context.trace_id:032x}"
    assert agent.span_id == tool.parent_span_id == f"{context.span_id:016x}"
    assert agent.parent_span_id is None
    assert (tool.name, tool.kind, tool.status) == ("tool", "internal", "error")
    assert agent.status == "unset"
    assert tool.attributes == {
        "tracegrad.rollout": "r1",
        "ok": True,
        "n": 3,
        "x": 0.5,
        "many": ["a", "b"],
        "otel.status_description": "broke",
    }
    assert agent.start_ns < tool.start_ns <= tool.end_ns < agent.end_ns


def test_a_resource_may_name_the_rollout(tracer: Callable[..., Tracer], store: Store) -> None:
    with tracer({"tracegrad.rollout": "r2"}).start_as_current_span("agent"):
        pass
    assert [span.name for span in store.spans("r2")] == ["agent"]


def test_spans_of_a_trace_seen_with_a_call_join_its_rollout(
    rig: ProxyWithEngine, tracer: Callable[..., Tracer]
) -> None:
    with tracer().start_as_current_span("plain") as span:
        context = span.get_span_context()
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
        body = {"messages": [{"role": "user", "content": "hi"}]}
        rig.http.post(
            "/rollouts/r3/v1/chat/completions", json=body, headers={"traceparent": parent}
        )
    [found] = rig.store.spans("r3")
    assert found.name == "plain"
    assert rig.store.rollout_turns("r3")[0].parent_span_id == found.span_id


def test_spans_of_nobody_are_kept(tracer: Callable[..., Tracer], store: Store) -> None:
    with tracer().start_as_current_span("alone"):
        pass
    assert store.rollouts() == []
    with store.reading() as connection:
        rows = connection.exec_driver_sql("select name, rollout_id from spans").all()
    assert [tuple(row) for row in rows] == [("alone", None)]


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"content-type": "text/plain"}, b"{}", 415),
        ({"content-type": "application/json"}, b"no", 400),
        ({"content-type": "application/x-protobuf"}, b"\xff\xff\xff", 400),
        ({"content-type": "application/x-protobuf", "content-encoding": "gzip"}, b"no", 400),
        (
            {"content-type": "application/x-protobuf", "content-encoding": "gzip"},
            gzip.compress(b"", mtime=0)[:-4],
            400,
        ),
        ({"content-type": "application/x-protobuf", "content-encoding": "br"}, b"", 415),
        (
            {"content-type": "application/x-protobuf", "content-encoding": "gzip"},
            gzip.compress(bytes(65 << 20), 1, mtime=0),
            413,
        ),
    ],
)
def test_what_is_no_export_is_refused(
    rig: ProxyWithEngine, headers: dict[str, str], content: bytes, status: int
) -> None:
    answer = rig.http.post("/v1/traces", content=content, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"
