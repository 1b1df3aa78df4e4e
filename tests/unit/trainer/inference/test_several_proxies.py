"""Weights that change behind several proxies: all of them wait, or those that are there."""

from __future__ import annotations

import logging
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from support.system.log_lines import our_lines
from support.trainer.sleeping_engine import MODEL_FOLDER, SleepingEngine
from tracegrad_trainer.inference import proxy_control
from tracegrad_trainer.inference.control_routes import Peer, ProxyGoneError, PushError
from tracegrad_trainer.inference.proxy_control import ENDS_S
from tracegrad_trainer.inference.weight_push import WeightPusher

GATE = ["/api/push/hold", "/api/push/version", "/api/push/release"]


@pytest.fixture(autouse=True)
def _ended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_control, "ENDS_S", 0.01)


@pytest.fixture
def engine() -> Iterator[SleepingEngine]:
    """With the first of the proxies on its port."""
    engine = SleepingEngine()
    engine.weights |= {1: 1.0, 2: 2.0, 3: 3.0}
    yield engine
    engine.close()
    assert engine.wrong == []


class SecondProxy:
    """On a port of its own; `server` is a new one after each start."""

    def __init__(self) -> None:
        self.port = 0
        self.start()
        self.server.state.held = False

    def start(self) -> None:
        """It holds its calls, and knows of no version."""
        self.server = SleepingEngine(self.port)
        self.port = self.server.server.server_port
        self.server.weights = defaultdict(lambda: MODEL_FOLDER)  # no engine is here
        self.server.start_proxy_again(version=0)

    def end(self) -> None:
        self.server.close()

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def state(self) -> tuple[int, bool]:
        return self.server.state.version, self.server.state.held


@pytest.fixture
def second() -> Iterator[SecondProxy]:
    second = SecondProxy()
    yield second
    second.end()


@pytest.fixture
def pusher(engine: SleepingEngine, second: SecondProxy, tmp_path: Path) -> Iterator[WeightPusher]:
    folder, shared = tmp_path / "checkpoint", tmp_path / "shm"
    folder.mkdir()
    shared.mkdir()
    save_file({"w": torch.tensor([MODEL_FOLDER])}, folder / "model.safetensors")
    proxies = [engine.url, second.url]
    with WeightPusher(
        engine.url, proxies, checkpoint=folder, directory=shared, timeout_s=30
    ) as pusher:
        yield pusher


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.tensor([value]))]


def when(engine: SleepingEngine, moment: str, do: Callable[[], None]) -> None:
    """Does that as the call comes, once."""
    left = [do]

    def look(number: int, path: str) -> bool:
        if path == moment and left:
            left.pop()()
        return False

    engine.refuse = look


def gate_calls(server: SleepingEngine) -> list[str]:
    """A hold is renewed where one that is gone had to be waited for."""
    return [call for call, _ in groupby(call for call in server.calls if call in GATE)]


def test_all_wait_before_the_engine_stops_and_open_after_it_goes_on(
    engine: SleepingEngine, second: SecondProxy, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    assert gate_calls(engine) == gate_calls(second.server) == GATE
    held, marked, opened = (second.server.at[second.server.calls.index(call)] for call in GATE)
    at = dict(zip(engine.calls, engine.at, strict=True))
    assert held < at["/pause keep true"] < marked < at["/resume"] < opened
    assert second.state == (1, False)
    assert not pusher.restore()


def test_a_push_goes_on_without_one_that_is_gone(
    second: SecondProxy,
    engine: SleepingEngine,
    pusher: WeightPusher,
    caplog: pytest.LogCaptureFixture,
) -> None:
    second.end()
    with caplog.at_level(logging.WARNING):
        pusher.push(1, weights(1.0))
        pusher.push(2, weights(2.0))
    said = [line for line in our_lines(caplog) if second.url in line]
    assert said == [f"the proxy at {second.url} is gone: weights are pushed without it"]
    assert gate_calls(engine) == GATE * 2
    assert engine.serves


def test_one_that_is_there_again_holds_until_it_has_been_told_the_version(
    engine: SleepingEngine, second: SecondProxy, pusher: WeightPusher
) -> None:
    second.end()
    pusher.push(1, weights(1.0))
    assert not pusher.restore(), "it is not there yet"
    second.start()
    assert second.state == (0, True)
    assert pusher.restore()
    assert second.state == (1, False)
    assert gate_calls(engine) == GATE, "the others' calls go on meanwhile"
    assert engine.loaded == [1.0]
    assert not pusher.restore()
    pusher.push(2, weights(2.0))
    assert second.state == (2, False)


@pytest.mark.parametrize("moment", ["/pause keep true", "/resume"])
def test_one_that_comes_in_the_middle_of_a_push_is_not_opened_by_it(
    engine: SleepingEngine, second: SecondProxy, pusher: WeightPusher, moment: str
) -> None:
    second.end()
    when(engine, moment, second.start)
    pusher.push(1, weights(1.0))
    assert second.state == (0, True)
    assert pusher.restore()
    assert second.state == (1, False)


def test_one_that_ends_in_the_middle_of_a_push_costs_the_others_nothing(
    engine: SleepingEngine, second: SecondProxy, pusher: WeightPusher
) -> None:
    when(engine, "/pause keep true", second.end)
    pusher.push(1, weights(1.0))
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", second.port))
    assert gate_calls(engine) == GATE
    assert engine.serves


def test_what_one_refuses_is_taken_back_from_all(
    engine: SleepingEngine, second: SecondProxy, pusher: WeightPusher
) -> None:
    second.server.refuse_once("/api/push/version")
    with pytest.raises(PushError, match=rf"{second.url}: the proxy refused /api/push/version"):
        pusher.push(1, weights(1.0))
    assert engine.state.version == 0
    assert second.state == (0, False)
    assert engine.serves
    pusher.push(2, weights(2.0))
    assert second.state == (2, False)


def test_one_that_can_no_more_be_told_keeps_its_calls_and_the_others_go_on(
    engine: SleepingEngine, second: SecondProxy, pusher: WeightPusher
) -> None:
    """It hangs, or its host is off, since the hold."""
    pusher.push(1, weights(1.0))
    second.server.refuse = lambda number, path: path != "/api/push/hold"
    with pytest.raises(PushError, match="version 2 is not served, version 1 still is"):
        pusher.push(2, weights(2.0))
    assert engine.state.version == 1
    assert engine.serves
    assert second.state == (1, True)
    second.server.refuse = lambda number, path: False
    assert pusher.restore()
    assert second.state == (1, False)


def test_one_that_has_the_version_of_a_push_that_failed_is_not_opened(
    engine: SleepingEngine, second: SecondProxy, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    engine.refuse_once("/api/push/version")
    told = second.server.calls.count("/api/push/version")

    def look(number: int, path: str) -> bool:
        return path == "/api/push/version" and second.server.calls.count(path) > told + 1

    second.server.refuse = look
    with pytest.raises(PushError, match="version 2 is not served, version 1 still is"):
        pusher.push(2, weights(2.0))
    assert (engine.state.version, engine.serves) == (1, True)
    assert second.state == (2, True)
    second.server.refuse = lambda number, path: False
    assert pusher.restore()
    assert second.state == (1, False)


@pytest.mark.parametrize("several", [False, True])
def test_proxies_that_others_start_again_in_the_middle_of_a_push_cost_no_engine(
    tmp_path: Path, several: bool
) -> None:
    engine = SleepingEngine()
    proxies = [SecondProxy() for _ in range(1 + several)]
    (tmp_path / "c").mkdir()
    save_file({"w": torch.tensor([MODEL_FOLDER])}, tmp_path / "c" / "model.safetensors")
    engine.weights = defaultdict(lambda: MODEL_FOLDER)
    calls: list[str] = []

    def others(number: int, path: str) -> bool:
        calls.append(path)
        for proxy in proxies:
            if path == "/pause keep true" and calls.count(path) == 1:
                proxy.end()
            if path == "/start_weight_update" and calls.count(path) == 2:
                proxy.start()
        return False

    engine.refuse = others
    urls = [proxy.url for proxy in proxies]
    with WeightPusher(engine.url, urls, checkpoint=tmp_path / "c", directory=tmp_path) as pusher:
        with pytest.raises(PushError, match="version 1 is not served, version 0 still is"):
            pusher.push(1, weights(1.0))
        assert not engine.state.paused
        assert {proxy.state for proxy in proxies} == {(0, False)}
        pusher.push(2, weights(2.0))
        assert {proxy.state for proxy in proxies} == {(2, False)}
    for server in (engine, *(proxy.server for proxy in proxies)):
        server.close()


def test_one_that_ends_is_waited_for_and_one_that_has_ended_is_not(
    engine: SleepingEngine,
    second: SecondProxy,
    pusher: WeightPusher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proxy that is told to end finishes its calls behind a closed port."""
    slept: list[float] = []
    monkeypatch.setattr(proxy_control, "ENDS_S", ENDS_S)
    monkeypatch.setattr(proxy_control.time, "sleep", slept.append)
    second.end()
    pusher.push(1, weights(1.0))
    assert len(slept) == 1
    assert 0 < slept[0] <= ENDS_S
    assert len(engine.sent("/api/push/hold")) == 2, "the hold is renewed behind that"
    _let_end(pusher)
    pusher.push(2, weights(2.0))
    assert len(slept) == 1
    second.start()
    assert pusher.restore()
    second.end()
    assert not pusher.restore(), "its end is seen"
    _let_end(pusher)
    pusher.push(3, weights(3.0))
    assert len(slept) == 1


def test_one_that_ends_again_is_waited_for_again(
    second: SecondProxy, pusher: WeightPusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(proxy_control, "ENDS_S", ENDS_S)
    monkeypatch.setattr(proxy_control.time, "sleep", slept.append)
    second.end()
    pusher.push(1, weights(1.0))
    _let_end(pusher)
    second.start()
    assert pusher.restore()
    second.end()
    pusher.push(2, weights(2.0))
    assert len(slept) == 2


def _let_end(pusher: WeightPusher) -> None:
    """As if so much time had passed."""
    gone_at = pusher._swap.proxy._gone_at
    gone_at.update({url: at - ENDS_S for url, at in gone_at.items()})


@pytest.mark.parametrize(
    ("cause", "gone"),
    [
        (ConnectionRefusedError(111, "refused"), True),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), True),
        (socket.gaierror(socket.EAI_AGAIN, "the resolver does not answer"), False),
        (OSError(24, "too many open files"), False),
        (TimeoutError("timed out"), False),
    ],
)
def test_gone_is_who_refuses_or_has_no_name(cause: OSError, gone: bool) -> None:
    error = httpx.ConnectError("no connection")
    error.__cause__ = cause
    proxy = Peer("the proxy", "http://127.0.0.1:1", 1.0)
    proxy._client = httpx.Client(transport=httpx.MockTransport(raising(error)))
    with pytest.raises(PushError) as raised:
        proxy.get("/x")
    assert isinstance(raised.value, ProxyGoneError) is gone


def raising(error: Exception) -> Callable[[httpx.Request], httpx.Response]:
    def answer(_: httpx.Request) -> httpx.Response:
        raise error

    return answer


def test_nobody_there_is_an_error(engine: SleepingEngine, tmp_path: Path) -> None:
    gone = [SecondProxy(), SecondProxy()]
    for each in gone:
        each.end()
    with WeightPusher(engine.url, [each.url for each in gone], directory=tmp_path) as pusher:
        for version in (1, 2):
            with pytest.raises(PushError, match=rf"{gone[0].url} does not answer /api/push/hold"):
                pusher.push(version, weights(1.0))
    assert engine.serves
