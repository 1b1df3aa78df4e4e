"""The order of a push, and what happens when a step of it fails (vLLM and proxy are recorded)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file

from tracegrad_trainer.inference.control_routes import EngineLostError, PushError
from tracegrad_trainer.inference.weight_push import WeightPusher
from tracegrad_trainer.utils.network import find_free_port

Refusal = Callable[[str, dict[str, Any]], bool]


class Peers:
    """vLLM's and the proxy's push routes on one port; remembers the calls, refuses on demand."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.loaded: list[float] = []  # the value of "w" in each update that was taken
        self.refuse: Refusal = lambda path, body: False
        peers = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                refused = peers.take(urlsplit(self.path).path, json.loads(body or "{}"))
                answer = json.dumps({"error": {"message": "not today"}} if refused else {}).encode()
                self.send_response(500 if refused else 200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def take(self, path: str, body: dict[str, Any]) -> bool:
        self.calls.append((path, body))
        if self.refuse(path, body):
            return True
        if path == "/update_weights":
            self.loaded += [load_file(p)["w"].item() for p in body["update_info"]["paths"]]
        return False

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.server.shutdown()
    peers.server.server_close()


@pytest.fixture
def pusher(peers: Peers, tmp_path: Path) -> Iterator[WeightPusher]:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_file({"w": torch.tensor([0.5])}, checkpoint / "model.safetensors")
    shared = tmp_path / "shm"
    shared.mkdir()
    with WeightPusher(peers.url, peers.url, checkpoint=checkpoint, directory=shared) as pusher:
        yield pusher
    assert list(shared.iterdir()) == []


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.tensor([value]))]


LOAD = ["/start_weight_update", "/update_weights", "/finish_weight_update"]


def test_a_push_walks_in_order(peers: Peers, pusher: WeightPusher) -> None:
    def verify() -> None:
        peers.calls.append(("verify", {}))

    report = pusher.push(1, weights(1.0), verify)
    assert peers.paths == [
        "/api/push/hold", "/pause", *LOAD, "/api/push/version", "/resume", "verify",
        "/api/push/release",
    ]  # fmt: skip
    calls = dict(peers.calls)
    assert calls["/finish_weight_update"] == {"weight_version": "1"}
    assert calls["/api/push/version"] == {"version": 1}
    assert peers.loaded == [1.0]
    assert pusher.version == 1
    stages = ["write", "hold", "pause", "load", "set_version", "resume", "verify", "release"]
    assert list(report.seconds) == stages


def test_a_refused_update_puts_the_checkpoint_back(peers: Peers, pusher: WeightPusher) -> None:
    updates = 0

    def refuse_first_update(path: str, body: dict[str, Any]) -> bool:
        nonlocal updates
        updates += path == "/update_weights"
        return path == "/update_weights" and updates == 1

    peers.refuse = refuse_first_update
    with pytest.raises(PushError, match=r"version 1 is not served, version 0 still is.*not today"):
        pusher.push(1, weights(1.0))
    assert peers.loaded == [0.5]
    finished = [body for path, body in peers.calls if path == "/finish_weight_update"]
    assert finished == [{"weight_version": "0"}]
    assert peers.paths[-2:] == ["/resume", "/api/push/release"]
    assert pusher.version == 0

    peers.refuse = lambda path, body: False
    pusher.push(2, weights(2.0))
    assert peers.loaded[-1] == 2.0


def test_the_version_before_is_put_back_not_the_checkpoint(
    peers: Peers, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    marks = 0

    def refuse_first_mark(path: str, body: dict[str, Any]) -> bool:
        nonlocal marks
        marks += path == "/api/push/version"
        return path == "/api/push/version" and marks == 1

    peers.refuse = refuse_first_mark
    with pytest.raises(PushError, match="the proxy refused /api/push/version"):
        pusher.push(2, weights(2.0))
    assert peers.loaded == [1.0, 2.0, 1.0]
    assert peers.calls[-3] == ("/api/push/version", {"version": 1})


def test_a_failed_verification_puts_the_old_weights_back(
    peers: Peers, pusher: WeightPusher
) -> None:
    def verify() -> None:
        raise ArithmeticError("off by 3 nats")

    with pytest.raises(PushError, match="served wrongly, version 0 is back: off by 3 nats"):
        pusher.push(1, weights(1.0), verify)
    assert peers.loaded == [1.0, 0.5]
    back = ["/pause", *LOAD, "/api/push/version", "/resume", "/api/push/release"]
    assert peers.paths[-len(back) :] == back
    assert peers.calls[-3] == ("/api/push/version", {"version": 0})


def test_an_engine_without_weights_is_not_resumed(peers: Peers, pusher: WeightPusher) -> None:
    peers.refuse = lambda path, body: path == "/update_weights"
    with pytest.raises(EngineLostError, match="paused without usable weights, restart it"):
        pusher.push(1, weights(1.0))
    assert "/resume" not in peers.paths
    assert peers.paths[-1] == "/api/push/release"


class OpenUpdate:
    """As vLLM does it: beside an update that is open no second one begins, and one that fails to
    load is over. The first `failing` finishes fail."""

    def __init__(self, *, active: bool, failing: int = 0) -> None:
        self.active, self.failing = active, failing

    def __call__(self, path: str, body: dict[str, Any]) -> bool:
        if path == "/start_weight_update":
            was, self.active = self.active, True
            return was
        if path == "/update_weights" and not body["update_info"]["paths"]:
            self.active = False
            return True
        if path == "/finish_weight_update":
            self.failing -= 1
            self.active = self.failing >= 0
            return self.active
        return False


def test_an_update_that_a_killed_pusher_left_open_is_ended_first(
    peers: Peers, pusher: WeightPusher
) -> None:
    peers.refuse = OpenUpdate(active=True)
    pusher.push(1, weights(1.0))
    assert peers.paths[2:7] == [*LOAD[:2], *LOAD]
    assert peers.loaded == [1.0]


def test_what_was_served_returns_after_a_finish_that_failed(
    peers: Peers, pusher: WeightPusher
) -> None:
    peers.refuse = OpenUpdate(active=False, failing=1)
    with pytest.raises(PushError, match=r"version 1 is not served, version 0 still is.*finish"):
        pusher.push(1, weights(1.0))
    assert peers.loaded == [1.0, 0.5]
    assert peers.paths[-2:] == ["/resume", "/api/push/release"]


def test_nothing_is_held_for_weights_that_are_not_finite(
    peers: Peers, pusher: WeightPusher
) -> None:
    with pytest.raises(PushError, match="w holds values that are not finite"):
        pusher.push(1, weights(float("nan")))
    assert peers.calls == []


def test_a_version_is_pushed_once(pusher: WeightPusher) -> None:
    pusher.push(1, weights(1.0))
    with pytest.raises(ValueError, match="version: 1 is served already"):
        pusher.push(1, weights(2.0))


def test_a_dead_engine_is_one_line(peers: Peers, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{find_free_port()}"
    with (
        WeightPusher(url, peers.url, directory=tmp_path) as pusher,
        pytest.raises(EngineLostError, match=f"vLLM at {url} does not answer /pause") as caught,
    ):
        pusher.push(1, weights(1.0))
    assert "\n" not in str(caught.value)
    assert peers.paths == ["/api/push/hold", "/api/push/release"]


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint: no \*\.safetensors"):
        WeightPusher("http://127.0.0.1:1", checkpoint=tmp_path)


@pytest.fixture
def second() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.server.shutdown()
    peers.server.server_close()


@pytest.fixture
def both(peers: Peers, second: Peers, tmp_path: Path) -> Iterator[WeightPusher]:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_file({"w": torch.tensor([0.5])}, checkpoint / "model.safetensors")
    urls = [peers.url, second.url]
    with WeightPusher(urls, peers.url, checkpoint=checkpoint, directory=tmp_path) as pusher:
        yield pusher


def test_a_push_goes_to_all_engines(peers: Peers, second: Peers, both: WeightPusher) -> None:
    both.push(1, weights(1.0))
    assert second.paths == ["/pause", *LOAD, "/resume"]
    assert [path for path in peers.paths if not path.startswith("/api/")] == second.paths
    assert peers.paths.count("/api/push/version") == 1
    assert peers.loaded == second.loaded == [1.0]


def test_what_one_engine_refuses_is_taken_back_from_all(
    peers: Peers, second: Peers, both: WeightPusher
) -> None:
    both.push(1, weights(1.0))
    second.refuse = once("/update_weights")
    with pytest.raises(PushError, match=f"version 1 still is: engine {second.url}: .*not today"):
        both.push(2, weights(2.0))
    assert peers.loaded == [1.0, 2.0, 1.0]
    assert second.loaded == [1.0, 1.0]
    assert both.version == 1
    assert peers.paths[-1] == "/api/push/release"
    assert second.paths[-1] == "/resume"
    both.push(3, weights(3.0))
    assert peers.loaded[-1] == second.loaded[-1] == 3.0


def test_a_pause_that_one_engine_refuses_holds_none(
    peers: Peers, second: Peers, both: WeightPusher
) -> None:
    second.refuse = once("/pause")
    with pytest.raises(PushError, match=f"engine {second.url}"):
        both.push(1, weights(1.0))
    assert peers.paths[-3:] == ["/pause", "/resume", "/api/push/release"]
    assert peers.loaded == second.loaded == []


def test_where_one_engine_is_lost_the_others_serve_what_they_did(
    peers: Peers, second: Peers, both: WeightPusher
) -> None:
    both.push(1, weights(1.0))

    def gone(path: str, body: dict[str, Any]) -> bool:
        if path == "/update_weights":
            raise ConnectionError("the engine ends")
        return False

    second.refuse = gone
    with pytest.raises(EngineLostError, match=f"engine {second.url}: .*does not answer"):
        both.push(2, weights(2.0))
    assert peers.loaded == [1.0, 2.0, 1.0]
    assert both.version == 1
    assert peers.paths[-2:] == ["/resume", "/api/push/release"]


def once(path: str) -> Refusal:
    left = [path]
    return lambda asked, body: asked in left and left.remove(asked) is None
