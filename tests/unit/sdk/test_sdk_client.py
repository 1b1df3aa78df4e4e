"""Events arrive, in order and once; and what cannot arrive is kept where it says."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sdk_server import FakeProxy, serve

from tracegrad import client
from tracegrad.client import Outbox
from tracegrad.records import Outcome, RewardGiven, RolloutFinished, RolloutOpened, SpanEnded
from tracegrad.resend import resend


def given(value: float) -> RewardGiven:
    return RewardGiven(rollout_id="r", value=value)


def values(proxy: FakeProxy) -> list[float]:
    return [
        event["value"]
        for call in proxy.sent_to("/api/events")
        for event in json.loads(call.body)["events"]
    ]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def undelivered(pid: int | None = None) -> Path:
    return Path(".tracegrad") / f"undelivered-{pid or os.getpid()}.jsonl"


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
    opened = client.as_event(RolloutOpened(rollout_id="r", task_id="t", tags={"a": "b"}))
    assert opened.pop("opened_at") == pytest.approx(time.time(), abs=5)
    assert opened == {
        "type": "rollout_opened",
        "rollout_id": "r",
        "task_id": "t",
        "agent": None,
        "tags": {"a": "b"},
        "task": None,
    }
    finished = client.as_event(RolloutFinished(rollout_id="r", outcome=Outcome.ABORTED))
    assert (finished["type"], finished["outcome"]) == ("rollout_finished", "aborted")
    assert client.as_event(given(1.0))["type"] == "reward"
    span = SpanEnded(trace_id="0", span_id="0", name="n", start_ns=1, end_ns=2)
    assert client.as_event(span)["type"] == "span_ended"


def test_order_and_batches(proxy: FakeProxy) -> None:
    box = Outbox(proxy.url)
    for i in range(1000):
        box.put(given(i))
    assert box.flush(10)
    assert values(proxy) == list(range(1000))
    assert len(proxy.sent_to("/api/events")) < 50
    box.close()


def test_many_threads_lose_nothing(proxy: FakeProxy) -> None:
    box = Outbox(proxy.url)

    def put(start: int) -> None:
        for i in range(start, start + 200):
            box.put(given(i))

    threads = [threading.Thread(target=put, args=(200 * k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert box.flush(10)
    assert sorted(values(proxy)) == list(range(1600))
    box.close()


def test_a_busy_proxy_is_asked_again_and_order_stays(
    proxy: FakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tracegrad")
    proxy.statuses["/api/events"] = [503, 429, 500]
    box = Outbox(proxy.url)
    box.put(given(1))
    time.sleep(0.02)
    box.put(given(2))
    assert box.flush(10)
    assert values(proxy) == [1, 2]
    said = [record.getMessage() for record in caplog.records if record.name == "tracegrad"]
    assert said[0].startswith(f"cannot reach the tracegrad proxy at {proxy.url} (it answers 503)")
    assert said[1:] == [f"the tracegrad proxy at {proxy.url} answers again"]
    box.close()


def test_a_proxy_that_starts_late_gets_everything(
    free_port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = Outbox(f"http://127.0.0.1:{free_port}", folder=tmp_path)
    for i in range(20):
        box.put(given(i))
    assert not box.flush(0.3)
    assert caplog.text.count("cannot reach the tracegrad proxy") == 1
    late, server = serve(free_port)
    try:
        assert box.flush(10)
        assert values(late) == list(range(20))
        box.close()
        assert not list(tmp_path.iterdir())
    finally:
        server.shutdown()
        server.server_close()


def test_putting_never_waits_for_the_proxy(free_port: int, tmp_path: Path) -> None:
    box = Outbox(f"http://127.0.0.1:{free_port}", folder=tmp_path)
    began = time.perf_counter()
    for i in range(1000):
        box.put(given(i))
    assert time.perf_counter() - began < 1.0
    box.close(0)


def test_what_cannot_be_delivered_is_kept_and_can_be_sent_later(
    free_port: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"http://127.0.0.1:{free_port}"
    monkeypatch.chdir(tmp_path)
    box = Outbox(url, capacity=3)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the folder is where the process began
    for i in range(5):
        box.put(given(i))  # the last two are too many
    box.close(0.1)
    box.put(given(5))
    box.close()
    monkeypatch.chdir(tmp_path)
    kept = undelivered()
    assert [event["value"] for event in lines(kept)] == [3, 4, 0, 1, 2, 5]
    assert caplog.text.count(f"python -m tracegrad.resend {kept.absolute()}") == 1

    with pytest.raises(client.Unreachable):
        resend([kept], url)
    late, server = serve(free_port)
    try:
        monkeypatch.setenv("TRACEGRAD_URL", url)
        sent = subprocess.run(
            [sys.executable, "-m", "tracegrad.resend", str(kept)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert (sent.stdout, sent.stderr) == ("6 events delivered\n", "")
        assert sorted(values(late)) == [0, 1, 2, 3, 4, 5]
        assert not kept.exists()
    finally:
        server.shutdown()
        server.server_close()


def test_a_refused_event_is_set_aside_and_its_neighbours_arrive(
    proxy: FakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.refuse = '"value":13'
    proxy.statuses["/api/events"] = [503]  # so that the rest gathers in one batch
    box = Outbox(proxy.url)
    for i in range(20):
        box.put(given(i))
    assert box.flush(10)
    assert sorted(values(proxy)) == [i for i in range(20) if i != 13]
    assert [event["value"] for event in lines(undelivered())] == [13]
    assert "the proxy refuses them: 422" in caplog.text
    box.close()


def test_a_full_disk_is_said_and_not_raised(
    free_port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    box = Outbox(f"http://127.0.0.1:{free_port}", folder=tmp_path / "file")
    box.put(given(1))
    box.close(0)
    assert "1 tracegrad events are lost" in caplog.text


AGENT = """
import tracegrad
@tracegrad.trace(task="t")
def solve():
    return 1.0
solve()
"""


def test_a_script_needs_no_flush(proxy: FakeProxy) -> None:
    done = python(AGENT)
    assert (done.returncode, done.stderr) == (0, "")
    kinds = [event["type"] for event in proxy.events()]
    assert kinds == ["rollout_opened", "reward", "rollout_finished"]
    assert [span.name for span in proxy.spans()] == ["solve"]
    assert not Path(".tracegrad").exists()


def test_a_script_without_a_proxy_runs_and_leaves_a_file(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.perf_counter()
    done = python(AGENT, TRACEGRAD_URL=f"http://127.0.0.1:{free_port}")
    assert done.returncode == 0
    assert time.perf_counter() - began < 10
    assert done.stderr.count("cannot reach the tracegrad proxy") == 1
    assert done.stderr.count("tracegrad events are kept in") == 1
    assert "Traceback" not in done.stderr
    (kept,) = Path(".tracegrad").iterdir()
    kinds = sorted(event["type"] for event in lines(kept))
    assert kinds == ["reward", "rollout_finished", "rollout_opened", "span_ended"]


def test_an_impatient_ctrl_c_loses_nothing(proxy: FakeProxy) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    box = client.outbox(proxy.url)
    proxy.statuses["/api/events"] = [503] * 1000
    box.put(given(1))
    box.feeders.append(interrupt)
    client._close_all()
    box.feeders.clear()
    assert [event["value"] for event in lines(undelivered())] == [1]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing_deliver_before_they_end(
    proxy: FakeProxy, method: str, tmp_path: Path
) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        f"""
import multiprocessing
import tracegrad

@tracegrad.trace
def solve(i):
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
    assert len(proxy.events("rollout_opened")) == 3
    assert len(proxy.spans()) == 3


def test_a_forked_child_leaves_its_parents_queue_to_the_parent(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{free_port}"
    monkeypatch.chdir(tmp_path)
    box = client.outbox(url)
    box.put(given(1))
    child = os.fork()
    if child == 0:
        try:
            box.put(given(2))
            box.close(0)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert [event["value"] for event in lines(undelivered(child))] == [2]
    late, server = serve(free_port)
    try:
        assert box.flush(10)
        assert values(late) == [1]
    finally:
        server.shutdown()
        server.server_close()
