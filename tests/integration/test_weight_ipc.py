"""Pushes in GPU memory that rank 0 shares: what goes over the wire is read by vLLM's parsers and
loaded by vLLM's own `ipc`. No GPU: their memory is the host's, and handles are a table's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from support.trainer.ipc_engine import REBUILD, HostGpus, IpcEngine
from support.trainer.sleeping_engine import MODEL_FOLDER
from tracegrad_trainer.inference import weight_ipc
from tracegrad_trainer.inference.control_routes import PushError
from tracegrad_trainer.inference.engine_sleep import SleepSettings
from tracegrad_trainer.inference.ipc_handles import (
    DEVICE,
    RebuildArguments,
    decode_handle,
    encode_handle,
)
from tracegrad_trainer.inference.live_weights import GatherOrder, LiveWeights
from tracegrad_trainer.inference.transports import ControlOf, transport_of
from tracegrad_trainer.inference.weight_ipc import IpcControl
from tracegrad_trainer.inference.weight_push import PushReport, WeightPusher

pytestmark = pytest.mark.vllm  # its classes, not its engine
SHAPES = {"x": (7,), "y": (3, 50), "head": (300,), "z": (200,)}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> HostGpus:
    monkeypatch.setattr(weight_ipc, "BUCKET_BYTES", 256)
    return HostGpus(monkeypatch, 3)


@pytest.fixture
def engine(gpus: HostGpus) -> Iterator[IpcEngine]:
    engine = IpcEngine([0, 2])
    engine.weights |= {1: 1.0, 2: 2.0, 3: 3.0}
    yield engine
    engine.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(dict(weights(MODEL_FOLDER)), folder / "model.safetensors")
    return folder


class Live(LiveWeights):
    """Ranks that have the weights of a value; `orders` that the others got, `asked` tensors."""

    def __init__(self) -> None:
        super().__init__(self.note, self.gather, lambda gathered: gathered)
        self.orders = self.asked = 0
        self.value = 0.0

    def note(self, order: GatherOrder) -> None:
        self.orders += 1

    def gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in weights(self.value):
            self.asked += 1
            yield pair

    def push(self, pusher: WeightPusher, version: int, verify: Any = None) -> PushReport:
        self.version, self.value = version, version
        try:
            return pusher.push(version, weights(version), verify)
        finally:
            self.version = None


@pytest.fixture
def live() -> Live:
    return Live()


@pytest.fixture
def transport(gpus: HostGpus, live: Live) -> ControlOf:
    host = torch.device("cpu")
    return partial(IpcControl, device=host, engine_devices=gpus.devices, live=live)


@pytest.fixture
def pusher(engine: IpcEngine, transport: ControlOf, checkpoint: Path) -> Iterator[WeightPusher]:
    with WeightPusher(
        engine.url,
        engine.url,
        checkpoint=checkpoint,
        directory=checkpoint.parent,
        transport=transport,
    ) as pusher:
        yield pusher
    assert engine.wrong == []


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(int(10 * value))
    others = [(name, torch.randn(shape).bfloat16()) for name, shape in SHAPES.items()]
    return [("w", torch.tensor([value])), *others, ("norm", torch.randn(5))]


def holds(engine: IpcEngine, value: float) -> bool:
    """All of its workers, every tensor, bit by bit."""
    wanted = dict(weights(value))
    return all(
        worker.loaded.keys() == wanted.keys()
        and all(torch.equal(worker.loaded[name], wanted[name]) for name in wanted)
        for worker in engine.workers
    )


def test_a_push_reaches_every_worker_bucket_by_bucket(
    engine: IpcEngine, pusher: WeightPusher, live: Live, gpus: HostGpus
) -> None:
    """The buffer is one and the same for all buckets: what was loaded does not change with it."""
    for version in (1, 2):
        report = live.push(pusher, version)
        assert holds(engine, version)
        assert list(report.seconds)[:3] == ["write", "connect", "hold"]
    assert engine.files == 0
    assert (live.orders, live.asked) == (2, 2 * len(weights(1)))
    whole = [update for update in engine.updates if update.last]
    assert len(whole) == 2 < len(engine.updates) // 2
    first = engine.updates[: len(engine.updates) // 2]
    assert first[-1] is whole[0], "the last bucket, and no other, ends the update"
    assert len({str(update.packed["ipc_handles"]) for update in first}) == 1
    # A trial opens one, and a push opens one for all of its buckets.
    assert len(gpus.opened) == len(engine.workers) * (1 + 2)


def test_buckets_are_packed_as_vllm_unpacks_them(
    engine: IpcEngine, pusher: WeightPusher, live: Live
) -> None:
    live.push(pusher, 1)
    named = [name for update in engine.updates for name in update.packed["names"]]
    assert sorted(named) == sorted(name for name, _ in weights(1))
    for update in engine.updates:
        packed = update.packed
        assert {len(packed[field]) for field in ("dtype_names", "shapes", "tensor_sizes")} == {
            len(packed["names"])
        }
        # Views of another dtype begin at its multiples, with nothing between them.
        assert all(size % 16 == 0 for size in packed["tensor_sizes"][:-1])


def test_weights_that_fail_verification_are_taken_back(
    engine: IpcEngine, pusher: WeightPusher, live: Live
) -> None:
    def verify() -> None:
        raise RuntimeError("too far apart")

    with pytest.raises(PushError, match="version 1 was served wrongly, version 0 is back"):
        live.push(pusher, 1, verify)
    assert holds(engine, 1), "what was wrong came from the ranks"
    assert (engine.files, engine.loaded) == (1, [MODEL_FOLDER])


def test_a_bucket_that_is_refused_is_taken_back(
    engine: IpcEngine, pusher: WeightPusher, live: Live
) -> None:
    live.push(pusher, 1)
    third = engine.calls.count("/update_weights") + 3
    engine.refuse = lambda _, path: (
        path == "/update_weights" and engine.calls.count("/update_weights") == third
    )
    with pytest.raises(PushError, match="version 2 is not served, version 1 still is"):
        live.push(pusher, 2)
    assert live.asked == 2 * len(weights(1)), "the other ranks gather to the end"
    assert (engine.files, engine.state.weight) == (1, 1.0)
    live.push(pusher, 3)
    assert holds(engine, 3)


def test_an_engine_that_was_started_again_is_tried_again(
    engine: IpcEngine, pusher: WeightPusher, live: Live
) -> None:
    for version in (1, 2):
        live.push(pusher, version)
    assert engine.calls.count("/init_weight_transfer_engine") == 1
    engine.start_again()
    live.push(pusher, 3)
    assert holds(engine, 3)
    assert engine.calls.count("/init_weight_transfer_engine") == 2


def test_a_worker_on_another_gpu_gets_files_and_it_is_said(
    engine: IpcEngine, pusher: WeightPusher, live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """Before anything is paused; vLLM's words name the GPU."""
    engine.workers[1].receiver._device.index = 5
    with caplog.at_level(logging.WARNING):
        live.push(pusher, 1)
    assert "IPC handle not found for GPU UUID GPU-5" in caplog.text
    assert "pushes go by files" in caplog.text
    assert engine.files == 1
    assert engine.calls.index("/init_weight_transfer_engine") < engine.calls.index("/api/push/hold")
    live.push(pusher, 2)
    assert engine.calls.count("/init_weight_transfer_engine") == 1, "not tried each time"


def test_memory_that_holds_something_else_is_found(
    engine: IpcEngine,
    pusher: WeightPusher,
    live: Live,
    gpus: HostGpus,
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened = gpus.open

    def wrong(*arguments: object) -> torch.Tensor:
        return opened(*arguments).flip(0)

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(torch.multiprocessing.reductions, "rebuild_cuda_tensor", wrong)
        live.push(pusher, 1)
    assert "opened by its handle holds something else" in caplog.text
    assert engine.files == 1


def test_an_engine_that_sleeps_takes_it_and_can_be_woken_by_files(
    engine: IpcEngine, transport: ControlOf, live: Live, checkpoint: Path, tmp_path: Path
) -> None:
    with WeightPusher(
        engine.url,
        engine.url,
        checkpoint=checkpoint,
        directory=tmp_path,
        transport=transport,
        sleep=SleepSettings(2, tmp_path),
    ) as pusher:
        pusher.stop_engine()
        live.push(pusher, 1)
        assert holds(engine, 1)
    assert engine.wrong == []


def test_a_handle_is_the_same_on_the_other_side() -> None:
    """Against the signature of torch's function: a field more or less of a new torch shows."""
    names = list(REBUILD.parameters)
    assert names == list(RebuildArguments._fields)
    assert names[DEVICE] == "storage_device", "vLLM's workers put theirs there"
    assert rebuild_cuda_tensor is not None
    handle = RebuildArguments(
        torch.Tensor,
        torch.Size([640]),
        (1,),
        0,
        type(torch.empty(1)._typed_storage()),
        torch.uint8,
        3,
        bytes(range(64)),
        2 << 20,
        4096,
        False,
        b"/torch_1_2",
        17,
        bytes(reversed(range(64))),
        True,
    )
    assert decode_handle(encode_handle(tuple(handle))) == handle
    assert type(decode_handle(encode_handle(tuple(handle))).event_sync_required) is bool
    for wrong in ({}, encode_handle(tuple(handle)) | {"event_handle": "?"}):
        with pytest.raises(ValueError, match="handles: one is no handle of GPU memory"):
            decode_handle(wrong)


@pytest.mark.parametrize("name", ["ipc", "nccl"])
def test_ranks_without_a_gpu_are_told(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"push.transport = '{name}' goes from GPU to GPU, and the"
    ):
        transport_of(name, torch.device("cpu"))  # type: ignore[arg-type]
