"""Rollouts that end with a reward and no call: the proxy counts, the SDK says so once."""

from __future__ import annotations

import http.client
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

import tracegrad
from support.cli.run_rollouts import printed
from support.proxy.proxy_with_engine import ProxyWithEngine
from support.store.events import rollout_events
from tracegrad import Rollout, call_check, context, exporter, reward, rollout, telemetry, trace
from tracegrad.exporter import EventExporter
from tracegrad.store.maintenance import examine

ASK = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
RAW_CALL = f"""
import http.client, os
from urllib.parse import urlsplit
url = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(url.netloc)
connection.request("POST", url.path + "/chat/completions", {json.dumps(json.dumps(ASK))})
answer = connection.getresponse()
assert answer.status == 200, answer.read()
"""


@pytest.fixture(autouse=True)
def sdk(rig: ProxyWithEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An SDK of its own in this process, which sends to the proxy."""
    exporters: dict[str, EventExporter] = {}
    monkeypatch.setattr(exporter, "_exporters", exporters)
    monkeypatch.setattr(telemetry, "_private", {})
    monkeypatch.setattr(call_check, "_SPAN_EXPORTERS", ())  # of another test's
    monkeypatch.setenv("TRACEGRAD_JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setenv("TRACEGRAD_URL", rig.url)
    monkeypatch.delenv("TRACEGRAD_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{rig.url}/v1")
    yield
    for each in exporters.values():
        each.shutdown()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="tracegrad")

    def found() -> list[str]:
        assert tracegrad.flush(60)
        said = [record.getMessage() for record in caplog.records]
        return [line for line in said if "no LLM call" in line]

    return found


def raw_call(url: str) -> None:
    """What no process sees of another one, nor of its own sockets."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc)
    connection.request("POST", f"{parts.path}/chat/completions", json.dumps(ASK))
    assert connection.getresponse().status == 200
    connection.close()


def in_a_thread(opened: Rollout) -> None:
    thread = threading.Thread(target=raw_call, args=(opened.base_url,))
    thread.start()
    thread.join()


def in_a_process(opened: Rollout) -> None:
    subprocess.run([sys.executable, "-c", RAW_CALL], env=opened.environ, check=True)


WAYS: dict[str, Callable[[Rollout], object]] = {
    "raw socket": lambda opened: raw_call(opened.base_url),
    "environment": lambda _: raw_call(os.environ["OPENAI_BASE_URL"]),
    "wrapped client": lambda opened: httpx.post(f"{opened.url}/v1/chat/completions", json=ASK),
    "thread": in_a_thread,
    "process": in_a_process,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_rollout_with_a_call_is_not_warned_of(
    way: str, rig: ProxyWithEngine, warnings: Callable[[], list[str]]
) -> None:
    with rollout(environ=True) as opened:
        WAYS[way](opened)
        opened.reward(1.0)
    assert warnings() == []
    assert len(rig.turns(opened.id)) == 1


def test_a_client_that_goes_to_the_plain_address_under_environ_is_warned_of(
    rig: ProxyWithEngine, warnings: Callable[[], list[str]], tmp_path: Path
) -> None:
    plain = f"{rig.url}/v1"

    @trace(environ=True, reward=True)
    def solve() -> float:
        raw_call(plain)
        raw_call(plain)
        return 1.0

    solve()
    raw_call(plain)  # somebody else's, before the end arrives
    solve()
    [said] = warnings()
    assert "(solve) ended with a reward, and no LLM call" in said
    assert f"2 calls came to the plain address {plain} meanwhile" in said
    assert "made before the rollout, or is given an address" in said
    url = f"sqlite:///{tmp_path}/store.db"
    empty = said.split()[1]
    shown = " ".join(printed(url, "explain", empty).split())
    assert "2 calls that named no rollout came to the proxy while it was open" in shown
    [found] = [each for each in examine(rig.store).findings if each.check == "no_turns"]
    assert "2 calls that named no rollout came while the newest of them was open" in found.message


def test_a_client_that_goes_elsewhere_is_warned_of_with_the_base_url(
    rig: ProxyWithEngine, warnings: Callable[[], list[str]]
) -> None:
    def made(name: str, *, environ: bool) -> None:
        with rollout(name=name, environ=environ) as opened:
            assert opened.base_url, "that it was looked at is no call"
            opened.reward(1.0)

    made("first", environ=False)
    made("second", environ=True)
    made("second", environ=True)
    first, second = warnings()
    assert f"Give the agent's client the base URL {rig.url}/v1" in first
    assert "plain address" not in first
    assert "does not follow the environment" in second


def test_outcomes_and_scores_that_are_not_the_agents_spend_no_warning(
    rig: ProxyWithEngine, warnings: Callable[[], list[str]]
) -> None:
    @trace
    def solve(how: str) -> None:
        if how == "no environment":
            reward(0.0)
            context.require().finish("env_error", "no container")
        elif how == "rollouts of its own":
            with rollout(name="inner") as inner:
                raw_call(inner.base_url)
            reward(1.0)
        elif how == "scored":
            reward(1.0)

    for how in ("no environment", "rollouts of its own", "without a score"):
        solve(how)
    with rollout(name="solve") as scored_later:
        pass
    scored_later.reward(1.0)
    rig.http.post(
        "/api/events",
        json={"events": [{"type": "reward", "rollout_id": scored_later.id, "value": 1.0}]},
    )
    assert warnings() == []
    solve("scored")
    assert len(warnings()) == 1


def test_a_call_that_is_still_running_is_one(
    rig: ProxyWithEngine, warnings: Callable[[], list[str]]
) -> None:
    gate = rig.engine.wait_before(0)
    with rollout() as opened:
        thread = threading.Thread(target=raw_call, args=(opened.base_url,))
        thread.start()
        while not rig.engine.requests:
            thread.join(0.005)
        opened.reward(1.0)
    assert warnings() == []
    assert rig.store.rollout_turns(opened.id) == []
    gate.set()
    thread.join()


def test_calls_that_are_reported_by_spans_have_time_to_arrive(
    rig: ProxyWithEngine,
    warnings: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ended(name: str) -> Rollout:
        with rollout(name=name) as opened:
            opened.reward(1.0)
        return opened

    # The process has an exporter of its own, which sends now and then.
    monkeypatch.setattr(call_check, "_SPAN_EXPORTERS", ("json",))
    reported, silent = ended("reported"), ended("silent")
    assert warnings() == [], "not yet"
    rig.store.append(rollout_events(reported.id)[1:2])  # what the proxy makes of an LLM span
    monkeypatch.setattr(call_check, "GRACE_S", 0.0)
    [said] = warnings()
    assert silent.id in said


def test_the_answer_counts_calls_of_what_was_ended_or_asked_for(rig: ProxyWithEngine) -> None:
    end = {"type": "rollout_finished", "rollout_id": "none"}
    raw_call(f"{rig.url}/rollouts/some/v1")
    answer = rig.http.post("/api/events", json={"events": [end], "calls_of": ["some", "none"]})
    assert answer.json() == {
        "accepted": 1,
        "calls": [{"rollout_id": "none", "calls": 0}, {"rollout_id": "some", "calls": 1}],
    }
    nothing = rig.http.post("/api/events", json={"events": [], "calls_of": ["nobody"]})
    assert nothing.json()["calls"] == [{"rollout_id": "nobody", "calls": 0}]
    assert nothing.status_code == 200
