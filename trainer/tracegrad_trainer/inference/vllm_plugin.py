"""Loaded by vLLM in each of its processes (entry point group `vllm.general_plugins`).

Kept light on purpose: the weight-transfer engine itself is `vllm_weight_transfer`, which only the
worker imports. `VllmSettings.environment` sets the two environment variables.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from functools import partial, wraps
from multiprocessing import resource_tracker
from typing import Any

from tracegrad_trainer.config.vllm import (
    ADAPTER_TRANSFER_BACKEND,
    DIE_WITH_PARENT_VARIABLE,
    FORK_ENGINE_VARIABLE,
    WEIGHT_TRANSFER_BACKEND,
)
from tracegrad_trainer.utils.subprocesses import die_with_parent

logger = logging.getLogger(__name__)


def register() -> None:
    """Registers the weight-transfer backends `tracegrad_...`, and has calls of several workers
    answered by all of them. Safe to call more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHT_TRANSFER_BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(
        WEIGHT_TRANSFER_BACKEND,
        "tracegrad_trainer.inference.vllm_weight_transfer",
        "SafetensorsWeightTransferEngine",
    )
    WeightTransferEngineFactory.register_engine(
        ADAPTER_TRANSFER_BACKEND,
        "tracegrad_trainer.inference.vllm_adapter_transfer",
        "AdapterTransferEngine",
    )
    if os.environ.get(DIE_WITH_PARENT_VARIABLE) == "1":
        _die_with_parent()
    if os.environ.get(FORK_ENGINE_VARIABLE) == "1":
        _fork_engine()
    else:  # a fork is alone, and to import it takes time
        _read_all_replies()


def _read_all_replies() -> None:
    """vLLM 0.32 raises at the first worker that refuses and leaves what those behind it say in
    their queues: the next calls take it for their own answer, and each one is off by one for good.
    So no worker refuses there: it returns the refusal, which is raised once all have been heard.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    call: Callable[..., Any] = MultiprocExecutor.collective_rpc

    @wraps(call)
    def collective_rpc(
        self: Any,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> Any:
        if others:  # forward passes: what one worker says alone, or later
            return call(self, method, timeout, args, kwargs, **others)
        replies = call(self, partial(_reply, method), timeout, args, kwargs)
        refusals = [refusal for _, refusal in replies if refusal is not None]
        if refusals:
            raise RuntimeError(
                f"Worker failed with error '{refusals[0]}', please check the stack trace above for"
                " the root cause"
            )
        return [value for value, _ in replies]

    MultiprocExecutor.collective_rpc = collective_rpc


def _reply(
    method: str | Callable[..., Any], worker: Any, *args: Any, **kwargs: Any
) -> tuple[Any, str | None]:
    """In a worker: what it says, or why it refuses."""
    try:
        if isinstance(method, str):
            return getattr(worker, method)(*args, **kwargs), None
        return method(worker, *args, **kwargs), None
    except Exception as error:
        logger.exception("a worker refuses %s", method)
        return None, str(error)


def _die_with_parent() -> None:
    """A killed API server must not leave its engine and worker behind."""
    if multiprocessing.parent_process() is not None:
        die_with_parent(signal.SIGKILL)
    os.register_at_fork(after_in_child=lambda: die_with_parent(signal.SIGKILL))


def _rendezvous_file(ip: str, port: int) -> str:
    """Where the one process of a group meets itself: vLLM would open a port on all addresses."""
    return f"file://{tempfile.mkdtemp(prefix='tracegrad-rendezvous-')}/store"


def _fork_engine() -> None:
    """Lets engine and worker be forks of the API server, as vLLM does it on other platforms.

    vLLM's CPU platform spawns them, to give each its own OpenMP settings; every spawn imports
    everything again, which is more than half of the start-up. With one OpenMP thread and no
    binding there is nothing to set (`VllmProcess` asks for this only then). For the same reason
    the model class may be inspected in this process instead of in one more.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.executor import uniproc_executor

    check: Callable[[Any, Any], None] = CpuPlatform.check_and_update_config.__func__

    def check_then_fork(cls: Any, config: Any) -> None:
        check(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_then_fork)
    registry._run_in_subprocess = lambda function: function()
    uniproc_executor.get_distributed_init_method = _rendezvous_file
    # One tracker for all: it outlives them and removes their shared memory, whatever ended them.
    resource_tracker.ensure_running()
