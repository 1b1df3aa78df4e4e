"""What the SDK makes of the proxy's count of calls; with the real proxy:
tests/unit/proxy/endpoints/test_call_counts.py."""

from __future__ import annotations

import json

import httpx
import pytest

import tracegrad
from support.sdk.fake_proxy import FakeProxy
from support.system.log_lines import our_lines
from tracegrad import call_check, exporter, rollout, trace
from tracegrad.call_check import CallCheck, RewardedRollout


@pytest.fixture(autouse=True)
def _no_exporters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_check, "_SPAN_EXPORTERS", ())  # of another test's


def ended(name: str, *, environ: bool = False, may_have_calls: bool = False) -> RewardedRollout:
    return RewardedRollout(
        rollout_id=f"id of {name}", name=name, environ=environ, may_have_calls=may_have_calls
    )


def asked(proxy: FakeProxy) -> list[list[str]]:
    found = [json.loads(call.body) for call in proxy.sent_to("/api/events")]
    return [body["calls_of"] for body in found if "calls_of" in body]


def test_an_older_proxy_leaves_it_to_what_the_process_saw(
    proxy: FakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    @trace(reward=True)
    def solve() -> float:
        return 1.0

    with rollout() as called:
        httpx.post(f"{called.url}/v1/chat/completions", json={})
        called.reward(1.0)
    with rollout() as elsewhere:
        assert elsewhere.base_url
        elsewhere.reward(1.0)
    with rollout():
        pass  # nothing was scored
    solve()
    solve()
    assert tracegrad.flush(60)
    [said] = [r.getMessage() for r in caplog.records if "no LLM call" in r.message]
    assert f"base URL {proxy.url}/v1" in said
    assert "(solve)" in said


def test_what_has_calls_is_not_asked_for(
    proxy: FakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    with rollout() as r:
        r.reward(1.0)
        proxy.answer = json.dumps(
            {"accepted": 3, "calls": [{"rollout_id": r.id, "calls": 2}]}
        ).encode()
    assert tracegrad.flush(60)
    assert asked(proxy) == []
    assert "no LLM call" not in caplog.text


def test_a_proxy_that_is_away_is_asked_when_it_is_back(
    proxy: FakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.statuses["/api/events"] = [503, 503, 503]
    with rollout(name="solve") as r:
        r.reward(1.0)
    assert tracegrad.flush(60)
    assert asked(proxy) == [[r.id]]
    assert "no LLM call" in caplog.text


def test_one_that_does_not_answer_the_question_alone_is_asked_again(
    proxy: FakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    exporter.exporter(proxy.url).calls.watch(ended("solve"))
    proxy.mode = 503
    assert tracegrad.flush(60), "nothing is on its way: a question holds nobody up"
    assert "no LLM call" not in caplog.text
    proxy.mode = "ok"
    assert tracegrad.flush(60)
    assert "no LLM call" in caplog.text


def test_a_proxy_that_refuses_the_question_is_an_older_one(
    proxy: FakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.refuse = "calls_of"
    with rollout(name="solve") as r:
        r.reward(1.0)
    assert tracegrad.flush(60)
    assert "no LLM call" in caplog.text


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{}", b'{"calls": 7}', b'{"calls": [{"rollout_id": []}]}', b'{"calls": [[]]}'],
)
def test_words_of_another_proxy_say_nothing(
    answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    check = CallCheck("http://proxy")
    check.watch(ended("seen", may_have_calls=True))
    check.watch(ended("unseen"))
    check.answered(answer)
    check.decide(check.due(hurry=True), answer)
    assert ["(unseen)" in line for line in our_lines(caplog)] == [True]
    assert check.due(hurry=True) == []


def test_of_many_rollouts_the_newest_are_asked_for_some_at_a_time() -> None:
    check = CallCheck("http://proxy")
    for number in range(call_check.MOST_WATCHED + 5):
        check.watch(ended(str(number)))
    first = check.due(hurry=True)
    assert len(first) == call_check.MOST_ASKED
    assert first[0] == "id of 5"
    assert check.due(hurry=False) == [], "calls that spans report may still come"


def test_each_function_is_warned_of_with_the_fix_that_fits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check = CallCheck("http://proxy")
    for each in (ended("a"), ended("b", environ=True), ended("a"), ended("c")):
        check.watch(each)
    counts = [
        {"rollout_id": "id of a", "calls": 0, "unnamed_calls": 1},
        {"rollout_id": "id of b", "calls": 0},
        {"rollout_id": "id of c", "calls": 3},
    ]
    check.decide(check.due(hurry=True), json.dumps({"calls": counts}).encode())
    first, second = our_lines(caplog)
    assert "; 1 call came to the plain address http://proxy/v1 meanwhile" in first
    assert "environ=True where it reads OPENAI_BASE_URL" in first
    assert "(b) ended with a reward, and no LLM call to http://proxy was its own:" in second
    assert "does not follow the environment" in second
    check.watch(ended("a"))
    assert check.due(hurry=True) == [], "once for each function"
