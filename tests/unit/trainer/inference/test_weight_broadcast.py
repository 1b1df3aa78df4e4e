"""Pushes to engines that see no files: rank 0 and their workers in real groups over gloo."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore

from support.trainer.broadcast_engine import BroadcastEngine
from support.trainer.sleeping_engine import MODEL_FOLDER, Refused
from tracegrad_trainer.inference import transfer_group, weight_broadcast, weight_buckets
from tracegrad_trainer.inference.control_routes import (
    EngineLostError,
    PushError,
    ServedWeights,
    VllmControl,
)
from tracegrad_trainer.inference.engine_group import EngineGroup
from tracegrad_trainer.inference.engine_sleep import SleepSettings
from tracegrad_trainer.inference.transfer_group import address_towards, host_store
from tracegrad_trainer.inference.transports import transport_of
from tracegrad_trainer.inference.weight_broadcast import BroadcastControl
from tracegrad_trainer.inference.weight_push import WeightPusher

GLOO = transport_of("gloo", torch.device("cpu"))
SHAPES = {"x": (7,), "y": (3, 50), "z": (200,)}


@pytest.fixture
def engine() -> Iterator[BroadcastEngine]:
    engine = BroadcastEngine()
    engine.weights |= {1: 1.0, 2: 2.0, 3: 3.0}
    yield engine
    engine.close()


second = engine


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(dict(weights(MODEL_FOLDER)), folder / "model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_buckets, "BUCKET_BYTES", 256)


def pusher_of(*engines: BroadcastEngine, checkpoint: Path) -> WeightPusher:
    urls = [engine.url for engine in engines]
    proxy, folder = urls[0], checkpoint.parent
    return WeightPusher(urls, proxy, checkpoint=checkpoint, directory=folder, transport=GLOO)


@pytest.fixture
def pusher(engine: BroadcastEngine, checkpoint: Path) -> Iterator[WeightPusher]:
    with pusher_of(engine, checkpoint=checkpoint) as pusher:
        yield pusher
    assert engine.wrong == []


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(int(10 * value))
    others = [(name, torch.randn(shape).bfloat16()) for name, shape in SHAPES.items()]
    return [("w", torch.tensor([value])), *others]


def holds(engine: BroadcastEngine, value: float) -> bool:
    """All of its workers, every tensor, bit by bit."""
    wanted = dict(weights(value))
    return len(engine.received) == engine.workers and all(
        found.keys() == wanted.keys()
        and all(torch.equal(found[name], wanted[name]) for name in wanted)
        for found in engine.received
    )


def test_a_push_reaches_every_worker_and_names_no_file(
    engine: BroadcastEngine, pusher: WeightPusher
) -> None:
    for version in (1, 2):
        report = pusher.push(version, weights(version))
        assert holds(engine, version)
        assert engine.version == str(version)
        assert list(report.seconds)[:3] == ["write", "connect", "hold"]
    updates = engine.sent("/update_weights")
    assert [len(body["update_info"]["buckets"]) > 2 for body in updates] == [True, True]
    assert not any("paths" in body["update_info"] for body in updates)
    assert engine.joined == 1, "the group is kept"
    assert engine.calls.index("/init_weight_transfer_engine") < engine.calls.index(
        "/api/push/hold"
    ), "calls do not wait for it"


def test_weights_that_fail_verification_are_taken_back(
    engine: BroadcastEngine, pusher: WeightPusher
) -> None:
    def verify() -> None:
        raise RuntimeError("too far apart")

    for version in (1, 2):
        with pytest.raises(PushError, match=f"version {version} was served wrongly, version 0"):
            pusher.push(version, weights(version), verify)
        assert holds(engine, MODEL_FOLDER)
        assert engine.version == "0"


def test_a_worker_that_ends_in_the_middle_costs_one_push(
    engine: BroadcastEngine, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1))
    engine.leaves_after = 1
    with pytest.raises(PushError, match="version 2 is not served, version 1 still is"):
        pusher.push(2, weights(2))
    assert holds(engine, 1)
    assert engine.joined == 2
    pusher.push(3, weights(3))
    assert holds(engine, 3)
    assert engine.joined == 2


def test_an_engine_that_was_started_again_gets_the_next_push(
    engine: BroadcastEngine, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1))
    engine.start_again()
    pusher.push(2, weights(2))
    assert holds(engine, 2)
    assert engine.joined == 2


def test_an_engine_that_joins_no_group_is_left_as_it_was(
    engine: BroadcastEngine, pusher: WeightPusher
) -> None:
    """One of files only, for instance; nothing waits, and nothing was put back."""
    engine.refuse_once("/init_weight_transfer_engine")
    with pytest.raises(PushError, match=r"is not pushed: push.transport = 'gloo': .*not today"):
        pusher.push(1, weights(1))
    assert not any("pause" in call or "hold" in call for call in engine.calls)
    pusher.push(2, weights(2))
    assert holds(engine, 2)


def test_workers_that_never_come_are_an_error(
    engine: BroadcastEngine, pusher: WeightPusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "init_weight_transfer_engine", lambda query, body: None)
    with pytest.raises(PushError, match="its workers do not take part"):
        pusher.push(1, weights(1))


def test_a_server_that_is_no_vllm_is_named(
    engine: BroadcastEngine, pusher: WeightPusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "get_world_size", lambda query, body: {"hello": 1})
    with pytest.raises(PushError, match=r"version 1 is not pushed: .*gloo.*no world_size"):
        pusher.push(1, weights(1))


def test_an_error_of_one_engine_is_raised_when_no_other_is_at_work() -> None:
    """Not only a PushError: a GPU may have no room for a bucket."""
    asked, over = Event(), Event()

    class Control(VllmControl):
        def load(self, served: ServedWeights) -> None:
            if self._peer.url.endswith("1"):
                Timer(0.2, asked.set).start()
                raise torch.OutOfMemoryError("no room")
            asked.wait(60)
            over.set()

    group = EngineGroup(("http://127.0.0.1:1", "http://127.0.0.1:2"), 60, Control)
    with pytest.raises(torch.OutOfMemoryError):
        group.load(ServedWeights(1, ()))
    assert over.is_set()
    group.close()


def test_workers_do_not_wait_for_a_rank_0_that_makes_no_group(
    engine: BroadcastEngine, pusher: WeightPusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = transfer_group._process_group

    def fail(store: Any, rank: int, *others: Any) -> Any:
        if rank == 0:
            raise RuntimeError("no device")
        return make(store, rank, *others)

    monkeypatch.setattr(transfer_group, "_process_group", fail)
    monkeypatch.setattr(weight_broadcast, "_LAST_WORDS_S", 200.0)  # not what ends it
    with pytest.raises(PushError, match=r"push.transport = 'gloo'") as failed:
        pusher.push(1, weights(1))
    assert engine.sent("/init_weight_transfer_engine")
    monkeypatch.undo()
    pusher.push(2, weights(2))
    assert holds(engine, 2)
    assert failed.value.__traceback__ is not None, "kept until here, with all that it holds"


def test_workers_wait_for_less_than_a_request_may_take(
    pusher: WeightPusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next trainer gives up an engine that still waits for one that is stopped."""
    make = transfer_group._process_group
    waits: dict[int, float] = {}

    def note(store: Any, rank: int, address: Any, host: str, timeout: timedelta) -> Any:
        waits[rank] = timeout.total_seconds()
        return make(store, rank, address, host, timeout)

    monkeypatch.setattr(transfer_group, "_process_group", note)
    pusher.push(1, weights(1))
    assert waits[0] == 300.0, "push.timeout_s"
    assert max(waits[1], waits[2]) < waits[0]


def test_two_trainers_that_push_to_one_engine_are_told(
    engine: BroadcastEngine, pusher: WeightPusher, checkpoint: Path
) -> None:
    """At once: the engine's word for its weights, version 1, is what both have left."""
    with pusher_of(engine, checkpoint=checkpoint) as other:
        pusher.push(1, weights(1))
        other.push(1, weights(1))
        with pytest.raises(PushError, match=r"version 1 still is: .*does another trainer push to"):
            pusher.push(2, weights(2))
    assert holds(engine, 1)


def test_workers_do_not_wait_for_a_rank_0_that_cannot_read_on(
    engine: BroadcastEngine, pusher: WeightPusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.push(1, weights(1))
    whole = weight_buckets.BucketReader.read

    def half(self: weight_buckets.BucketReader, **options: bool) -> Iterator[torch.Tensor]:
        monkeypatch.undo()
        yield next(whole(self))
        raise OSError("the disk is gone")

    monkeypatch.setattr(weight_buckets.BucketReader, "read", half)
    with pytest.raises(PushError, match="version 2 is not served, version 1 still is"):
        pusher.push(2, weights(2))
    assert holds(engine, 1)


def test_engines_have_groups_of_their_own(
    engine: BroadcastEngine, second: BroadcastEngine, checkpoint: Path
) -> None:
    """What one of them misses is taken back from both; what becomes of its group is its own."""
    with pusher_of(engine, second, checkpoint=checkpoint) as pusher:
        pusher.push(1, weights(1))
        assert holds(engine, 1)
        assert holds(second, 1)
        second.leaves_after = 0
        with pytest.raises(PushError, match=f"version 1 still is: engine {second.url}: "):
            pusher.push(2, weights(2))
        assert holds(engine, 1)
        assert holds(second, 1)
        assert (engine.joined, second.joined) == (1, 2)


def test_an_engine_that_is_gone_is_lost(engine: BroadcastEngine, checkpoint: Path) -> None:
    with pusher_of(engine, checkpoint=checkpoint) as pusher:
        pusher.push(1, weights(1))
        engine.close()
        with pytest.raises(EngineLostError, match="does not answer"):
            pusher.push(2, weights(2))


def test_an_engine_that_ended_in_the_middle_and_never_answers_is_not_waited_for(
    engine: BroadcastEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's server does whose engine process is killed during a call."""
    over = Event()

    def end(query: dict[str, str], body: dict[str, Any]) -> None:
        group = engine.groups[1]
        for rank in engine.groups:
            update = body["update_info"]
            group.announce(update["step"], rank, update["group"])
        engine.close_groups()
        over.wait(60)

    monkeypatch.setattr(weight_broadcast, "_LAST_WORDS_S", 0.1)
    with WeightPusher(
        engine.url, checkpoint=checkpoint, directory=checkpoint.parent, transport=GLOO
    ) as pusher:
        pusher.push(1, weights(1))
        monkeypatch.setattr(engine, "update_weights", end)
        monkeypatch.setattr(BroadcastControl, "world_size", gone)
        with pytest.raises(EngineLostError, match=r"nobody there \(after: the broadcast to vLLM"):
            pusher.push(2, weights(2))
        assert not over.is_set()
        over.set()


class Deaf:
    """In place of rank 0's end over NCCL, which waits for peers that have ended: from broadcast
    number `since` on."""

    def __init__(self, since: int) -> None:
        self.left = since
        self.over = Event()

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Any:
        self.left -= 1
        done = self.left >= 0
        return SimpleNamespace(is_completed=lambda: done, wait=lambda: done or self.wait())

    def wait(self) -> None:
        self.over.wait(60)
        raise RuntimeError("waited in vain")


@pytest.mark.parametrize("since", [0, 1, 2])
def test_a_peer_that_has_ended_is_noticed_by_what_the_engine_says(
    since: int, engine: BroadcastEngine, pusher: WeightPusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the group is made, and in a broadcast, the first one or a later one."""
    deaf = Deaf(since)
    stores: list[Any] = []

    def make(store: Any, *others: Any) -> Deaf:
        stores.append(store)
        return deaf

    def join(query: dict[str, str], body: dict[str, Any]) -> None:
        address = body["init_info"]
        store = TCPStore(address["host"], address["port"], is_master=False)
        for rank in (1, 2):
            store.set(f"join/{rank}", "here")
        if deaf.left <= 0:
            raise Refused("a worker has died")

    def update(query: dict[str, str], body: dict[str, Any]) -> None:
        for rank in (1, 2):
            stores[-1].set(f"{body['update_info']['step']}/{rank}", "here")
        raise Refused("a worker has died")

    monkeypatch.setattr(transfer_group, "_process_group", make)
    monkeypatch.setattr(engine, "init_weight_transfer_engine", join)
    monkeypatch.setattr(engine, "update_weights", update)
    began = time.monotonic()
    with pytest.raises(PushError, match="a worker has died"):
        pusher.push(1, weights(1))
    assert time.monotonic() - began < 60
    deaf.over.set()


def gone(self: BroadcastControl) -> int:
    raise EngineLostError("nobody there")


def test_a_group_is_reached_on_one_address_only() -> None:
    host = address_towards("http://127.0.0.1:8000")
    assert host == address_towards("unix:///run/vllm.sock") == "127.0.0.1"
    _, port = host_store(host)
    socket.create_connection((host, port), timeout=60).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=60)


def test_groups_of_nccl_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch reads when one is made is the process's environment."""
    seen: list[tuple[str | None, ...]] = []
    names = ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    monkeypatch.setenv(names[1], "3")
    monkeypatch.delenv(names[0], raising=False)

    def make(_: int) -> None:
        with transfer_group._nccl_raises():
            time.sleep(0.01)
            seen.append(tuple(map(os.environ.get, names)))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(make, range(8)))
    assert seen == [("1", "0")] * 8
    assert tuple(map(os.environ.get, names)) == (None, "3")


def test_a_name_may_have_addresses_that_are_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As localhost has ::1, where IPv6 is switched off."""
    no, here = ("not-an-address", 80), ("127.0.0.1", 80)
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", peer) for peer in (no, here)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert address_towards("http://localhost") == "127.0.0.1"


def test_an_engine_is_reached_over_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    host = address_towards("http://[::1]:8000")
    store, port = host_store(host)
    socket.create_connection((host, port), timeout=60).close()
    assert store.port == port


def test_what_cannot_go_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'nccl' goes from GPU to GPU, and the ranks train on cpu"):
        transport_of("nccl", torch.device("cpu"))
    with pytest.raises(ValueError, match="sleep: what wakes an engine loads it from files"):
        WeightPusher("http://127.0.0.1:1", sleep=SleepSettings(1, tmp_path), transport=GLOO)
