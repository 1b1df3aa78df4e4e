"""An engine of several workers: a call that one of them refuses leaves no answer behind that a
later call would take for its own."""

from __future__ import annotations

import logging
import pickle
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from support.engines.vllm_server import tiny_settings
from support.trainer.ipc_engine import HostGpus
from support.trainer.tiny_model import load_model, perturb, reference_logprobs
from tracegrad_trainer.inference import vllm_plugin
from tracegrad_trainer.inference.control_routes import PushError, VllmControl
from tracegrad_trainer.inference.live_weights import LiveWeights
from tracegrad_trainer.inference.logprob_probe import compare_logprobs, sample_probe
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.inference.weight_ipc import IpcControl
from tracegrad_trainer.inference.weight_push import WeightPusher

pytestmark = pytest.mark.vllm
PROMPT = [5, 6, 7, 8]


def test_pushes_go_on_behind_whatever_two_workers_have_refused(
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Memory of GPUs that they do not have, an update of nothing, and half of a model."""
    gpus, host = HostGpus(monkeypatch, 2).devices, torch.device("cpu")
    live = LiveWeights(lambda _: None, lambda: iter(()), lambda gathered: gathered)
    transport = partial(IpcControl, device=host, engine_devices=gpus, live=live)
    model = load_model(tiny_model_dir)
    settings = tiny_settings(tiny_model_dir, tmp_path / "vllm.log")
    settings = settings.model_copy(update={"tensor_parallel": 2})

    def check() -> None:
        sample = sample_probe(process.url, PROMPT, tokens=16)
        trained = reference_logprobs(model, PROMPT, sample.token_ids)
        compare_logprobs(sample.logprobs, trained, 1e-4)

    with VllmProcess(settings) as process:
        process.wait_healthy(timeout=240)
        control = VllmControl(process.url, 60)
        control.forget_staged()  # none is open
        control.forget_staged()
        assert control.world_size() == 2
        with caplog.at_level(logging.WARNING):
            pusher = WeightPusher(process.url, checkpoint=tiny_model_dir, transport=transport)
            pusher.push(1, perturb(model, seed=1).named_parameters(), lambda *_: check())
        assert "pushes go by files" in caplog.text
        half = [(name, p) for name, p in model.named_parameters() if "k_proj" not in name]
        with pytest.raises(PushError, match=r"version 2 is not served, version 1 still is.*lacks"):
            pusher.push(2, half)
        check()
        pusher._files.close()  # it was killed, and left an update open
        control._start()

        with WeightPusher(process.url, version=1, checkpoint=tiny_model_dir) as pusher:
            pusher.push(3, perturb(model, seed=3).named_parameters(), lambda *_: check())
            assert control.weight_version() == "3"
        control.close()


class Worker:
    """`says`: what it answers, in order; what is no number it refuses with."""

    def __init__(self, *says: float | str) -> None:
        self.says = deque(says)
        self.replies: deque[Any] = deque()

    def number(self) -> float:
        said = self.says.popleft()
        if isinstance(said, str):
            raise ValueError(said)
        return said


class Executor(MultiprocExecutor):
    """vLLM's, over queues of this process."""

    def __init__(self, *workers: Worker) -> None:
        self.is_failed = False
        self.futures_queue = deque()
        self.workers = list(workers)
        self.rpc_broadcast_mq: Any = self
        self.response_mqs: Any = [Replies(worker) for worker in workers]

    def enqueue(self, request: tuple[Any, ...]) -> None:
        pickle.loads(pickle.dumps(request))
        for rank, worker in enumerate(self.workers):
            proc: Any = WorkerProc.__new__(WorkerProc)
            proc.worker, proc.rank, proc.use_async_scheduling = worker, rank, False
            proc.worker_response_mq = type("Queue", (), {"enqueue": worker.replies.append})
            proc._execute_worker_rpc(request)


class Replies:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def dequeue(self, timeout: float | None) -> Any:
        return self.worker.replies.popleft()


@pytest.mark.parametrize("first", [("no", "no"), ("no", 1), (1, "no")])
def test_a_refused_call_is_answered_by_all_before_the_next(first: tuple[Any, Any]) -> None:
    vllm_plugin.register()
    executor = Executor(Worker(first[0], 2, "late", 3), Worker(first[1], 20, 30, 40))
    with pytest.raises(RuntimeError, match="Worker failed with error 'no'"):
        executor.collective_rpc("number")
    assert executor.collective_rpc("number") == [2, 20]
    with pytest.raises(RuntimeError, match="'late'"):
        executor.collective_rpc(lambda worker: worker.number(), 5.0, (), {})
    assert executor.collective_rpc("number", unique_reply_rank=1) == 40
    assert not executor.workers[1].replies
