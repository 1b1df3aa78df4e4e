"""Events arrive, in order and once; and what cannot arrive is kept where it says."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tracegrad
from support.sdk.fake_proxy import FakeProxy, serve
from support.system.log_lines import our_lines
from tracegrad import exporter, transport
from tracegrad.events import Outcome, Reward, RolloutFinished, RolloutStarted, Span
from tracegrad.exporter import EventExporter
from tracegrad.resend import resend, resend_journals


def given(value: float) -> Reward:
    return Reward(rollout_id="r", value=value)


def values(proxy: FakeProxy) -> list[float]:
    return [
        event["value"]
        for call in proxy.sent_to("/api/events")
        for event in json.loads(call.body)["events"]
    ]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def kept(journals: Path) -> list[dict[str, Any]]:
    """The records of all journals, oldest first within each."""
    return [event for path in sorted(journals.rglob("0*.jsonl")) for event in lines(path)]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_events_on_the_wire() -> None:
    opened = exporter.event_payload(RolloutStarted(rollout_id="r", task_id="t", tags={"a": "b"}))
    assert opened.pop("opened_at") == pytest.approx(time.time(), abs=5)
    assert opened == {
        "type": "rollout_started",
        "rollout_id": "r",
        "task_id": "t",
        "agent": None,
        "tags": {"a": "b"},
        "task": None,
    }
    finished = exporter.event_payload(RolloutFinished(rollout_id="r", outcome=Outcome.ABORTED))
    assert (finished["type"], finished["outcome"]) == ("rollout_finished", "aborted")
    reward = exporter.event_payload(replace(given(1.0), created_at=2.0))
    assert (reward["type"], reward["given_at"]) == ("reward", 2.0)
    said = replace(given(1.0), created_at=2.0, given_at=1.0)
    assert exporter.event_payload(said)["given_at"] == 1.0
    span = Span(trace_id="0", span_id="0", name="n", start_ns=1, end_ns=2)
    assert exporter.event_payload(span)["type"] == "span"


@pytest.fixture
def to(proxy: FakeProxy) -> EventExporter:
    """The exporter to `proxy`, which the fixtures end."""
    return exporter.exporter(proxy.url)


def test_rewards_that_are_of_no_use_are_said_once(
    proxy: FakeProxy, to: EventExporter, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.answer = json.dumps(
        {
            "accepted": 1,
            "unknown_rollouts": ["typo"],
            "after_training": [
                {"rollout_id": "r", "state": "trained", "step": 7},
                {"rollout_id": "s", "state": "leased"},
            ],
        }
    ).encode()
    for value in (1.0, 2.0):
        to.put(given(value))
        assert to.flush(60)
    assert [line.partition(";")[0] for line in our_lines(caplog)] == [
        "reward for rollout typo: the proxy knows no such rollout",
        "reward for rollout r came after step 7 had trained it: it is kept, and changes nothing",
        "reward for rollout s came after training took it: it is kept, and changes nothing",
    ]


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"unknown_rollouts": 7}', b"<html>"])
def test_an_answer_of_another_proxy_costs_nothing(
    proxy: FakeProxy, to: EventExporter, answer: bytes
) -> None:
    proxy.answer = answer
    to.put(given(1.0))
    assert to.flush(60)
    assert values(proxy) == [1.0]


@pytest.fixture
def nowhere(free_port: int) -> EventExporter:
    return exporter.exporter(f"http://127.0.0.1:{free_port}")


def test_order_and_batches(proxy: FakeProxy, to: EventExporter) -> None:
    for i in range(1000):
        to.put(given(i))
    assert to.flush(60)
    assert values(proxy) == list(range(1000))
    assert len(proxy.sent_to("/api/events")) < 50


def test_many_threads_lose_nothing(proxy: FakeProxy, to: EventExporter) -> None:
    def put(start: int) -> None:
        for i in range(start, start + 200):
            to.put(given(i))

    threads = [threading.Thread(target=put, args=(200 * k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert to.flush(60)
    assert sorted(values(proxy)) == list(range(1600))
    assert tracegrad.stats().recorded == tracegrad.stats().acknowledged == 1600


def test_a_busy_proxy_is_asked_again_and_order_stays(
    proxy: FakeProxy, to: EventExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tracegrad")
    proxy.statuses["/api/events"] = [503, 429, 500]
    to.put(given(1))
    time.sleep(0.02)
    to.put(given(2))
    assert to.flush(60)
    assert values(proxy) == [1, 2]
    said = [record.getMessage() for record in caplog.records if record.name == "tracegrad"]
    assert said[0].startswith(f"cannot reach the tracegrad proxy at {proxy.url} (it answers 503)")
    assert said[1:] == [f"the tracegrad proxy at {proxy.url} answers again"]


def test_a_proxy_that_starts_late_gets_everything(
    nowhere: EventExporter, free_port: int, journals: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(20):
        nowhere.put(given(i))
    assert not nowhere.flush(0.3)
    assert caplog.text.count("cannot reach the tracegrad proxy") == 1
    assert [event["value"] for event in kept(journals)] == list(range(20))
    late, server = serve(free_port)
    try:
        assert nowhere.flush(60)
        assert values(late) == list(range(20))
        nowhere.close()
        assert kept(journals) == []
        assert not any(nowhere.folder.iterdir()), "nothing is left behind"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("mode", ["hang", "reset", 500, 503, 401, 404])
def test_nothing_is_lost_whatever_the_proxy_did_before(
    proxy: FakeProxy, to: EventExporter, mode: str | int
) -> None:
    proxy.mode = mode
    for i in range(10):
        to.put(given(i))
    assert not to.flush(0.3)
    proxy.mode = "ok"
    assert to.flush(60)
    assert values(proxy) == list(range(10))


def test_what_a_process_left_the_next_one_sends(
    nowhere: EventExporter, free_port: int, journals: Path
) -> None:
    for i in range(5):
        nowhere.put(given(i))
    nowhere.shutdown()  # as the end of a process: its lock is free
    late, server = serve(free_port)
    try:
        again = EventExporter(nowhere.url)
        again.put(given(5))
        assert again.flush(60)
        assert sorted(values(late)) == [0, 1, 2, 3, 4, 5]
        again.shutdown()
        assert kept(journals) == []
    finally:
        server.shutdown()
        server.server_close()


def test_the_journal_of_a_living_process_is_its_own(
    proxy: FakeProxy, nowhere: EventExporter, to: EventExporter, journals: Path
) -> None:
    beside = EventExporter(proxy.url, folder=nowhere.folder)
    nowhere.put(given(1))
    beside.put(given(2))
    assert beside.flush(60)
    assert values(proxy) == [2]
    beside.shutdown()
    assert [event["value"] for event in kept(journals)] == [1]


@pytest.mark.parametrize(
    ("record", "refused", "torn"),
    [
        (b'{"type":"otlp_spans","version":2}', 1, 0),
        (b'{"type":"otlp_spans","protobuf":7}', 1, 0),
        (b"[" * 100_000 + b"]" * 100_000, 0, 1),
    ],
    ids=["newer", "no text", "deep"],
)
def test_a_record_that_nobody_can_read_holds_up_no_other(
    proxy: FakeProxy, to: EventExporter, record: bytes, refused: int, torn: int
) -> None:
    left = to.folder / "0000000000001-1-left"
    left.mkdir(mode=0o700, parents=True)
    (left / "lock").touch()
    event = b'{"type":"reward","rollout_id":"r","reward_id":"1","value":7}'
    (left / "000000.jsonl").write_bytes(b"%b\n%b\n" % (record, event))
    assert to.flush(60)
    assert values(proxy) == [7]
    assert not left.exists()
    stats = tracegrad.stats()
    assert (stats.refused, stats.dropped.get("torn", 0)) == (refused, torn)
    assert (to.folder / "refused.jsonl").exists() == bool(refused)


def test_journals_are_sent_by_a_command(
    nowhere: EventExporter, free_port: int, journals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(5):
        nowhere.put(given(i))
    nowhere.shutdown()
    with pytest.raises(transport.ProxyUnreachable):
        resend_journals(nowhere.url)
    assert len(kept(journals)) == 5
    late, server = serve(free_port)
    try:
        monkeypatch.setenv("TRACEGRAD_URL", nowhere.url)
        command = [sys.executable, "-m", "tracegrad.resend"]
        sent = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert (sent.stdout, sent.stderr) == ("5 events delivered\n", "")
        assert values(late) == [0, 1, 2, 3, 4]
        assert kept(journals) == []
    finally:
        server.shutdown()
        server.server_close()


def test_a_refused_event_is_kept_and_its_neighbours_arrive(
    proxy: FakeProxy, to: EventExporter, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.refuse = '"value":13'
    for i in range(20):
        to.put(given(i))
    assert to.flush(60)
    assert sorted(values(proxy)) == [i for i in range(20) if i != 13]
    refused = to.folder / "refused.jsonl"
    assert [event["value"] for event in lines(refused)] == [13]
    assert "refuses an event: 422" in caplog.text
    assert tracegrad.stats().refused == 1
    with pytest.raises(transport.ProxyRefused):
        resend([refused], proxy.url)
    proxy.refuse = None
    assert resend([refused], proxy.url) == 1
    assert values(proxy)[-1] == 13
    assert not refused.exists()


def test_what_only_memory_held_at_the_end_is_counted_as_lost(
    free_port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").touch()
    to = EventExporter(f"http://127.0.0.1:{free_port}", folder=tmp_path / "a file" / "journal")
    exporter._exporters[to.url] = to
    to.put(given(1))
    to.put(given(2))
    assert caplog.text.count("events wait in memory and are lost with the process") == 1
    to.close()
    to.close()  # as a process does that multiprocessing closes, too
    assert tracegrad.stats().dropped == {"unsent": 2}
    assert "tracegrad dropped 2 events (unsent)" in caplog.text


def test_the_journals_of_a_proxy_have_a_limit_and_drops_are_counted(
    free_port: int, journals: Path, caplog: pytest.LogCaptureFixture
) -> None:
    to = EventExporter(f"http://127.0.0.1:{free_port}", limit=2_000)
    exporter._exporters[to.url] = to
    for i in range(100):
        to.put(given(i))
    recorded = tracegrad.stats().recorded
    assert 1 < recorded < 20
    assert tracegrad.stats().dropped == {"journal_full": 100 - recorded}
    assert [event["value"] for event in kept(journals)] == list(range(recorded))
    assert caplog.text.count("tracegrad drops events (journal full)") == 1


def test_a_record_that_is_too_large_is_dropped_and_counted(
    proxy: FakeProxy, to: EventExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = given(1)
    record, _ = exporter._encoded(event)
    for bound in (len(record), len(record) - 1):
        monkeypatch.setattr(exporter, "LARGEST_RECORD", bound)
        to.put(event)
    assert to.flush(60)
    assert values(proxy) == [1]
    assert tracegrad.stats().dropped == {"too_large": 1}


def test_without_a_disk_events_wait_in_memory_and_are_dropped_by_count(
    proxy: FakeProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("tracegrad.journal.MEMORY_BYTES", 1_000)
    to = EventExporter(proxy.url, folder=tmp_path / "file" / "below")
    exporter._exporters[proxy.url] = to
    proxy.mode = 503
    for i in range(100):
        to.put(given(i))
    recorded = tracegrad.stats().recorded
    assert tracegrad.stats().dropped == {"journal_full": 100 - recorded}
    proxy.mode = "ok"
    assert to.flush(60)
    assert values(proxy) == list(range(recorded))


AGENT = """
import tracegrad
@tracegrad.trace(task="t", reward=True)
def solve():
    assert tracegrad.context.require().base_url  # where a process of its own would call
    return 1.0
solve()
"""


def test_a_script_needs_no_flush(proxy: FakeProxy, journals: Path) -> None:
    done = python(AGENT)
    assert (done.returncode, done.stderr) == (0, "")
    kinds = [event["type"] for event in proxy.events()]
    assert kinds == ["rollout_started", "reward", "rollout_finished"]
    assert [span.name for span in proxy.spans()] == ["solve"]
    assert not Path(".tracegrad").exists()
    assert not [path for path in journals.rglob("*") if path.is_file()]


def test_a_script_without_a_proxy_runs_and_leaves_a_journal(free_port: int, journals: Path) -> None:
    done = python(AGENT, TRACEGRAD_URL=f"http://127.0.0.1:{free_port}")
    assert done.returncode == 0
    assert done.stderr.count("cannot reach the tracegrad proxy") == 1
    assert done.stderr.count("tracegrad events stay in") == 1
    assert "Traceback" not in done.stderr
    kinds = sorted(event["type"] for event in kept(journals))
    assert kinds == ["otlp_spans", "reward", "rollout_finished", "rollout_started"]
    for path in journals.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, f"{path} is not the owner's alone"


def test_an_impatient_ctrl_c_loses_nothing(
    proxy: FakeProxy, to: EventExporter, journals: Path
) -> None:
    def interrupted(timeout: float, stalled: float | None = None) -> bool:
        raise KeyboardInterrupt

    proxy.mode = 503
    to.put(given(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(to, "flush", interrupted)
        exporter._close_all()
    assert [event["value"] for event in kept(journals)] == [1]
    proxy.mode = "ok"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing_deliver_before_they_end(
    proxy: FakeProxy, method: str, tmp_path: Path
) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        f"""
import multiprocessing
import tracegrad

@tracegrad.trace(reward=True)
def solve(i):
    assert tracegrad.context.require().base_url  # where a process of its own would call
    return i

if __name__ == "__main__":
    solve(0)
    context = multiprocessing.get_context({method!r})
    children = [context.Process(target=solve, args=(i,)) for i in (1, 2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(event["value"] for event in proxy.events("reward")) == [0, 1, 2]
    assert len(proxy.events("rollout_finished")) == 3
    assert len(proxy.events("rollout_started")) == 3
    assert len(proxy.spans()) == 3


def test_a_forked_childs_journal_is_its_own_and_a_living_process_sends_it(
    nowhere: EventExporter, free_port: int, journals: Path
) -> None:
    nowhere.put(given(1))
    child = os.fork()
    if child == 0:
        nowhere.put(given(2))
        os._exit(0)  # as a pool's worker ends: nothing of ours runs
    os.waitpid(child, 0)
    assert sorted(event["value"] for event in kept(journals)) == [1, 2]
    late, server = serve(free_port)
    try:
        assert nowhere.flush(60)
        assert sorted(values(late)) == [1, 2]
    finally:
        server.shutdown()
        server.server_close()


POOL = """
import multiprocessing
import tracegrad

@tracegrad.trace(reward=True)
def solve(i):
    assert tracegrad.context.require().base_url  # where a process of its own would call
    return i

if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(3) as pool:
        print(sum(pool.map(solve, range(18))))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_workers_of_a_pool_lose_nothing(proxy: FakeProxy, method: str, tmp_path: Path) -> None:
    """Their pool ends them by SIGTERM as it is left."""
    script = tmp_path / "agent.py"
    script.write_text(POOL.format(method=method))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "153\n", "")
    rewards = {event["reward_id"]: event["value"] for event in proxy.events("reward")}
    assert sorted(rewards.values()) == list(range(18))
    assert len({span.span_id for span in proxy.spans()}) == 18


def test_a_variable_that_nothing_reads_is_named_once(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("STOER", "PORXY_PORT", "traner_optim__lr", "NOTHING_LIKE_IT"):
        monkeypatch.setenv(f"TRACEGRAD_{name}", "x")
    read = ("PROXY_PORT", "TRAINER_OPTIM__LR", "JOURNAL_BYTES", "STORE", "TEST_SEED")
    for name in (*read, "FORK_ENGINE"):
        monkeypatch.setenv(f"TRACEGRAD_{name}", "1000000")
    for _ in range(2):
        with tracegrad.rollout():
            pass
    said = "TRACEGRAD_{}: nothing reads this variable"
    assert our_lines(caplog) == [
        said.format("NOTHING_LIKE_IT"),
        said.format("PORXY_PORT") + "; did you mean TRACEGRAD_PROXY_PORT?",
        said.format("STOER") + "; did you mean TRACEGRAD_STORE?",
        said.format("traner_optim__lr") + "; did you mean TRACEGRAD_TRAINER_OPTIM__LR?",
    ]
