"""Who may give a reward: with each kind of key, each way that an agent might score itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.engines.mock_engine import MODEL
from support.proxy.otlp_json import TRACE, Json, chat, export, send, span
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from tracegrad import exporter, rollout
from tracegrad.events import Outcome, Reward
from tracegrad.store import Ledger, Store

ADMIN = "the-admin's-own-key"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
YEAR_5138 = 1e11
EVALUATION = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 9.0}
FLAT = {"evaluations.0.evaluation.name": "reward", "evaluations.0.evaluation.score": 9.0}
WHOLE = {"trace.annotations.0.annotation.name": "reward"} | {
    "trace.annotations.0.annotation.score": 9.0
}
OWN_ENDS = [
    {"type": "reward", "rollout_id": "mine", "value": 9.0},
    {"type": "reward", "rollout_id": "mine", "value": 9.0, "source": "judge", "created_at": 1e11},
    {"type": "rollout_finished", "rollout_id": "mine", "outcome": "infra_error"},
    {"type": "rollout_started", "rollout_id": "mine", "task_id": "an easy one"},
]


@pytest.fixture
def closed(serve_proxy: ServeProxy) -> Iterator[httpx.Client]:
    """As the harness has it: with the admin key of a proxy that has one."""
    with serve_proxy(admin_key=ADMIN, as_admin=True) as http:
        yield http


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def minted(closed: httpx.Client, *scopes: str) -> dict[str, str]:
    """Of rollout "mine"."""
    answer = closed.post("/api/rollouts/mine/keys", json={"scopes": scopes})
    assert answer.status_code == 201, answer.text
    return bearer(answer.json()["key"])


def post(http: httpx.Client, *events: Json, **more: Any) -> httpx.Response:
    return http.post("/api/events", json={"events": events}, **more)


def given(store: Store, rollout_id: str = "mine") -> list[tuple[float, str]]:
    return [(reward.value, reward.source) for reward in store.rewards(rollout_id)]


@pytest.fixture(params=["closed", "open", "header", "query", "beside"])
def agent(request: pytest.FixtureRequest) -> httpx.Client:
    """As an agent has it: the proxy with the key that it was given, wherever a client puts it."""
    if request.param != "closed":
        http: httpx.Client = request.getfixturevalue("http")
        if request.param == "query":
            http.params = httpx.QueryParams(key="tg-mine")
        elif request.param == "header":
            http.headers["x-tracegrad-key"] = "tg-mine"
        elif request.param == "beside":
            http.headers.update({"authorization": "Bearer sk-own", "x-api-key": "tg-mine"})
        else:
            http.headers.update(bearer("tg-mine"))
        return http
    closed: httpx.Client = request.getfixturevalue("closed")
    key = bearer(closed.post("/api/rollouts/mine/keys").json()["key"])  # what is the default
    return httpx.Client(base_url=closed.base_url, timeout=20, headers=key)


@pytest.mark.parametrize("event", OWN_ENDS, ids=lambda event: str(event["type"]))
def test_an_agent_posts_no_events(agent: httpx.Client, store: Store, event: Json) -> None:
    early = post(agent, event)
    agent.post("/v1/chat/completions", json=ASK).raise_for_status()
    late = post(agent, event)
    for answer in (early, late):
        assert answer.status_code == 403
        error = answer.json()["error"]
        assert error["code"] == "events_key_needed"
        assert "who is scored gives neither rewards nor ends" in error["message"]
    assert given(store) == []
    row = store.rollout("mine").summary
    assert (row.outcome, row.task_id, row.turns) == (None, None, 1)


def test_an_agent_gives_no_feedback(agent: httpx.Client, store: Store) -> None:
    answered = agent.post("/v1/chat/completions", json=ASK).json()["id"]
    for of in ({"rollout_id": "mine"}, {"response_id": answered}):
        answer = agent.post("/api/feedback", json={"thumbs": "up", **of})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "events_key_needed"
    assert given(store) == []


def test_a_key_for_events_gives_feedback_on_its_rollout_alone(
    closed: httpx.Client, store: Store
) -> None:
    key = minted(closed, "events")
    ids = [
        closed.post(f"/rollouts/{name}/v1/chat/completions", json=ASK).json()["id"]
        for name in ("mine", "other")
    ]
    answers = [
        closed.post("/api/feedback", json={"thumbs": "up", "response_id": each}, headers=key)
        for each in ids
    ]
    assert [answer.status_code for answer in answers] == [200, 403]
    assert given(store) == [(1.0, "events_key")]
    assert given(store, "other") == []


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_an_agent_mints_no_keys(agent: httpx.Client, method: str) -> None:
    body = {"scopes": ["events"]}
    answer = agent.request(method, "/api/rollouts/mine/keys", json=body)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "admin_key_needed"


@pytest.mark.parametrize(
    "scored",
    [
        span(9, "evaluate", events=[("gen_ai.evaluation.result", EVALUATION)]),
        span(9, "evaluate", FLAT),
        span(9, "evaluate", FLAT | {"tracegrad.rollout": "mine"}),
        span(9, "chat", chat(1) | FLAT | WHOLE),
        span(9, "agent", {"openinference.span.kind": "AGENT"} | WHOLE),
    ],
    ids=["event", "attribute", "named", "call", "trace"],
)
def test_an_agents_spans_are_kept_and_their_scores_are_not_believed(
    agent: httpx.Client, store: Store, scored: Json
) -> None:
    headers = {"traceparent": PARENT}
    agent.post("/v1/chat/completions", json=ASK, headers=headers).raise_for_status()
    answer = agent.post("/v1/traces", json=export([scored]))
    assert answer.status_code == 200
    reported = answer.json()["partialSuccess"]
    assert reported["rejectedSpans"] == "0"
    assert "is no reward, since it came with the agent's own key" in reported["errorMessage"]
    assert len(store.spans("mine")) == 1
    assert given(store) == given(store, TRACE) == []
    assert store.rollout("mine").summary.outcome is None, "nor does its root span end it"


def test_an_agent_scores_no_other_rollout(closed: httpx.Client, store: Store) -> None:
    mine = minted(closed, "calls")
    theirs = {"traceparent": PARENT, "baggage": "tracegrad.rollout=theirs"}
    answer = closed.post("/v1/chat/completions", json=ASK, headers=theirs).json()
    # By the trace, the baggage and the answer of the other one.
    closed.post("/v1/chat/completions", json=ASK, headers=mine | theirs).raise_for_status()
    answered = EVALUATION | {"gen_ai.response.id": answer["id"]}
    spans = [
        span(8, "evaluate", FLAT),
        span(9, "evaluate", events=[("gen_ai.evaluation.result", answered)]),
    ]
    closed.post("/v1/traces", json=export(spans), headers=mine).raise_for_status()
    assert given(store, "theirs") == given(store) == []
    named = span(7, "evaluate", FLAT | {"tracegrad.rollout": "theirs"})
    assert closed.post("/v1/traces", json=export([named]), headers=mine).status_code == 403
    assert [len(store.rollout_turns(name)) for name in ("mine", "theirs")] == [1, 1]


def test_the_score_of_anothers_trace_cannot_be_drawn_to_oneself(
    serve_proxy: ServeProxy, closed: httpx.Client, store: Store
) -> None:
    """The harness scores a trace; the agent of another rollout says that the trace is its own."""
    mine = minted(closed, "calls") | {"traceparent": PARENT}
    send(closed, span(2, "work", {"tracegrad.rollout": "theirs"}, parent=1))
    # A proxy that was restarted knows nothing of the trace but what is stored.
    with serve_proxy(admin_key=ADMIN, as_admin=True) as again:
        again.post("/v1/chat/completions", json=ASK, headers=mine).raise_for_status()
        lone = span(9, "evaluate", events=[("gen_ai.evaluation.result", EVALUATION)], parent=1)
        reported = again.post("/v1/traces", json=export([lone])).json()["partialSuccess"]
    assert "its trace is of no rollout" in reported["errorMessage"]
    assert given(store) == given(store, "theirs") == []


def test_the_score_of_anothers_answer_cannot_be_drawn_to_oneself(closed: httpx.Client) -> None:
    """Engines may take the answer's id from the request."""
    from tracegrad.events import Turn, logprob_array, token_id_array
    from tracegrad.proxy.capture.call_index import CallIndex

    def turn(rollout_id: str) -> Turn:
        return Turn(
            rollout_id=rollout_id,
            dialect="chat",
            model="m",
            prompt_token_ids=token_id_array(),
            completion_token_ids=token_id_array(),
            completion_logprobs=logprob_array(),
            policy_versions=(),
            response={"id": "chatcmpl-1"},
        )

    seen = CallIndex()
    theirs, mine = turn("theirs"), turn("mine")
    seen.turns_answered([theirs, theirs], inferred=False)
    assert seen.rollout_of_response("chatcmpl-1") == "theirs"
    seen.turns_answered([mine], inferred=False)
    assert seen.rollout_of_response("chatcmpl-1") is None
    seen.turns_answered([mine], inferred=False)
    assert seen.rollout_of_response("chatcmpl-1") is None
    assert seen.rollout_of_response(theirs.turn_id) == "theirs"


# Who may


def test_the_source_is_who_asked_and_the_time_the_proxys_own(
    rig: ProxyWithEngine, closed: httpx.Client
) -> None:
    said = {"label": "judge", "given_at": YEAR_5138}
    event: Json = {"type": "reward", "rollout_id": "mine", "value": 1.0} | said
    events_key = minted(closed, "events")
    post(closed, {"type": "rollout_started", "rollout_id": "mine"}).raise_for_status()
    before = time.time()
    for proxy, headers in (
        (closed, {}),
        (closed, events_key),
        (rig.http, {}),
        (rig.http, bearer("sk-x")),
    ):
        post(proxy, event, headers=headers).raise_for_status()
    score = span(9, "x", events=[("gen_ai.evaluation.result", EVALUATION)])
    send(closed, score, **{"tracegrad.rollout": "mine"})
    rewards = rig.store.rewards("mine")
    sources = ["admin_key", "events_key", "open", "open", "otel"]
    assert [reward.source for reward in rewards] == sources
    assert all(before <= reward.created_at <= time.time() for reward in rewards)
    assert {(reward.label, reward.given_at) for reward in rewards[:-1]} == {("judge", YEAR_5138)}


def test_the_source_that_earlier_sdks_sent_is_a_label(rig: ProxyWithEngine) -> None:
    event = {"type": "reward", "rollout_id": "r", "value": 1, "source": "judge", "created_at": 5.0}
    post(rig.http, event).raise_for_status()
    [reward] = rig.store.rewards("r")
    assert (reward.source, reward.label, reward.given_at) == ("open", "judge", 5.0)
    assert reward.created_at > 1e9


def test_a_key_for_events_scores_and_calls_no_models(closed: httpx.Client, store: Store) -> None:
    key = minted(closed, "events")
    own = [each for each in OWN_ENDS if each["type"] != "reward"]
    post(closed, *own, {"type": "reward", "rollout_id": "mine", "value": 1}, headers=key)
    score = span(9, "x", events=[("gen_ai.evaluation.result", EVALUATION)])
    closed.post("/v1/traces", json=export([score]), headers=key).raise_for_status()
    assert given(store) == [(1.0, "events_key"), (9.0, "otel")]
    assert store.rollout("mine").summary.outcome == Outcome.INFRA_ERROR
    for path in ("/v1/chat/completions", "/rollouts/mine/v1/chat/completions"):
        answer = closed.post(path, json=ASK, headers=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_needed")
    theirs = {"type": "reward", "rollout_id": "theirs", "value": 1.0}
    assert post(closed, theirs, headers=key).status_code == 403
    assert given(store, "theirs") == []


def test_a_key_for_events_asks_for_its_own_calls_alone(closed: httpx.Client) -> None:
    key = minted(closed, "events")
    for wanted, status in (["mine"], 200), (["mine", "theirs"], 403):
        body = {"events": [], "calls_of": wanted}
        assert closed.post("/api/events", json=body, headers=key).status_code == status


def test_a_key_may_be_for_both(closed: httpx.Client, store: Store) -> None:
    key = minted(closed, "calls", "events")
    closed.post("/v1/chat/completions", json=ASK, headers=key).raise_for_status()
    post(closed, {"type": "reward", "rollout_id": "mine", "value": 1}, headers=key)
    assert (len(store.rollout_turns("mine")), given(store)) == (1, [(1.0, "events_key")])


@pytest.mark.parametrize("scopes", [[], ["admin"], "events", ["calls", "rewards"]])
def test_a_scope_that_there_is_not_is_named(closed: httpx.Client, scopes: object) -> None:
    answer = closed.post("/api/rollouts/mine/keys", json={"scopes": scopes})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"].startswith("scopes")


def test_an_open_proxy_asks_for_no_key(rig: ProxyWithEngine) -> None:
    for body, key in (({}, "tg-mine"), ({"scopes": ["events"]}, None)):
        answer = rig.http.post("/api/rollouts/mine/keys", json=body)
        assert (answer.status_code, answer.json()) == (201, {"key": key})


def test_the_sdk_gives_the_agent_a_key_for_calls_and_the_scorer_one_for_events(
    closed: httpx.Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "_exporters", {})
    monkeypatch.setenv("TRACEGRAD_URL", str(closed.base_url))
    monkeypatch.setenv("TRACEGRAD_API_KEY", ADMIN)
    with rollout() as r:
        event = {"type": "reward", "rollout_id": r.id, "value": 1.0}
        assert post(closed, event, headers=bearer(r.api_key)).status_code == 403
        events_key = r.events_key
        assert events_key is not None
        post(closed, event, headers=bearer(events_key)).raise_for_status()
        r.reward(0.5)
    assert exporter.flush(60)
    assert given(store, r.id) == [(1.0, "events_key"), (0.5, "admin_key")]


def test_a_scorer_inside_a_rollout_is_not_taken_for_the_agent(
    rig: ProxyWithEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK signs what HTTP clients send to the proxy inside a rollout: calls, not rewards."""
    monkeypatch.setattr(exporter, "_exporters", {})
    monkeypatch.setenv("TRACEGRAD_URL", str(rig.http.base_url))
    monkeypatch.setenv("TRACEGRAD_API_KEY", ADMIN)  # though this proxy asks for none
    with rollout() as r:
        assert r.api_key.startswith(f"tg-{r.id}.")
        post(rig.http, {"type": "reward", "rollout_id": r.id, "value": 1}).raise_for_status()
        rig.http.post("/v1/chat/completions", json=ASK).raise_for_status()
    assert exporter.flush(60)
    assert given(rig.store, r.id) == [(1.0, "open")]
    assert len(rig.store.rollout_turns(r.id)) == 1


# What counts


def test_the_later_arrival_counts_whatever_times_are_stated(rig: ProxyWithEngine) -> None:
    for value, at in ((1.0, YEAR_5138), (0.25, 0.0), (0.5, time.time())):
        for turn in (None, 0):
            event = {"type": "reward", "rollout_id": "r", "value": value, "given_at": at}
            post(rig.http, event | {"turn": turn}).raise_for_status()
        assert rig.store.rollout("r").summary.reward == value
    rig.http.post("/rollouts/r/v1/chat/completions", json=ASK).raise_for_status()
    post(rig.http, {"type": "rollout_finished", "rollout_id": "r"}).raise_for_status()
    [group] = Ledger(rig.store).lease(groups=1, group_size=1, owner="t", ttl_s=60)
    [sample] = group.rollouts
    assert (sample.reward, sample.turn_rewards) == (0.5, {0: 0.5})


@pytest.mark.parametrize("stated", [0.0, YEAR_5138], ids=["1970", "5138"])
def test_stated_ends_order_and_lease_nothing(rig: ProxyWithEngine, stated: float) -> None:
    reward = {"type": "reward", "value": 1.0}
    end = {"type": "rollout_finished", "finished_at": stated}
    opened = {"type": "rollout_started", "opened_at": stated, "task_id": "t"}
    for name in ("first", "second", "third"):
        how = end if name == "second" else {"type": "rollout_finished"}
        post(rig.http, opened | {"rollout_id": name}).raise_for_status()
        rig.http.post(f"/rollouts/{name}/v1/chat/completions", json=ASK).raise_for_status()
        post(rig.http, *({**each, "rollout_id": name} for each in (reward, how)))
    before = time.time()
    rows = rig.store.rollouts()
    assert [row.rollout_id for row in rows] == ["third", "second", "first"]
    assert all(before - 60 <= row.opened_at <= before for row in rows)
    assert rig.store.outcomes("second")[0].finished_at == stated, "as it was sent"
    ledger = Ledger(rig.store)
    # Were it believed, a group of two would look left over for long, or come last.
    waiting = ledger.preview(groups=1, group_size=4, incomplete_after_s=3600)
    assert waiting.groups == []
    [group] = ledger.lease(groups=1, group_size=3, owner="t", ttl_s=60)
    assert [rollout.rollout_id for rollout in group.rollouts] == ["first", "second", "third"]


def test_a_time_that_may_be_true_is_kept(rig: ProxyWithEngine) -> None:
    """As of events that waited until the proxy was there."""
    at = time.time() - 600
    post(
        rig.http, {"type": "rollout_started", "rollout_id": "r", "opened_at": at}
    ).raise_for_status()
    assert rig.store.rollout("r").summary.opened_at == at


def test_a_rewards_id_that_another_rollout_has_is_refused(rig: ProxyWithEngine) -> None:
    """It would keep that one's own from being stored."""
    event = {"type": "reward", "reward_id": "w", "value": 1.0}
    post(rig.http, event | {"rollout_id": "mine"}).raise_for_status()
    answer = post(rig.http, event | {"rollout_id": "theirs"})
    assert answer.status_code == 422
    assert "reward_id: w is a reward of rollout mine" in answer.json()["error"]["message"]
    post(rig.http, event | {"rollout_id": "mine"}).raise_for_status()
    assert len(rig.store.rewards("mine")) == 1


def test_a_score_beyond_bounds_is_reported_and_not_kept(rig: ProxyWithEngine) -> None:
    huge = EVALUATION | {"gen_ai.evaluation.score.value": 1e308}
    spans = [
        span(2, "chat", chat(1), at=(2, 3)),
        span(9, "x", events=[("gen_ai.evaluation.result", huge)], parent=2),
    ]
    reported = rig.http.post("/v1/traces", json=export(spans)).json()["partialSuccess"]
    assert "value: reward 'reward' of rollout" in reported["errorMessage"]
    assert "give a finite number from -1,000,000 to 1,000,000" in reported["errorMessage"]
    assert rig.store.rewards(TRACE) == []


def test_rewards_of_an_old_store_that_would_be_refused_do_not_count(rig: ProxyWithEngine) -> None:
    rig.store.append([Reward(rollout_id="r", value=0.5), Reward(rollout_id="r", value=0.75)])
    with rig.store.appending() as connection:
        connection.exec_driver_sql("UPDATE rewards SET value = 1e308 WHERE value = 0.75")
    assert rig.store.rollout("r").summary.reward == 0.5
