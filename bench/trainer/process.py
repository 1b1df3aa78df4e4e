"""A peer in a process of its own: what one holds or has patched does not weigh on another."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.trainer.work import OURS, PLAIN, TRL_CALL, Peer, Work, gradients

# Threads of the step before may still be awake, waiting for more.
_REST_S = 0.3
_STARTS_WITHIN_S = 300


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a process: with model and optimizer before the first step, and at most."""

    before: int
    peak: int


class Running:
    """What is asked of the process, one thing at a time."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self._connection = connection

    def gradients(self, file: Path) -> float:
        """Do a step and write what `work.gradients` found -> the loss."""
        loss: float = self._ask("gradients", file)
        return loss

    def step(self) -> float:
        """Seconds."""
        time.sleep(_REST_S)
        seconds: float = self._ask("step")
        return seconds

    def memory(self) -> Memory:
        memory: Memory = self._ask("memory")
        return memory

    def _ask(self, *what: Any) -> Any:
        self._connection.send(what)
        return self._connection.recv()


@contextmanager
def running(name: str, work: Work, threads: int) -> Iterator[Running]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(theirs, name, work, threads), daemon=True
    )
    process.start()
    theirs.close()
    try:
        try:
            started = ours.poll(_STARTS_WITHIN_S) and ours.recv()
        except EOFError:
            started = False
        if not started:
            raise RuntimeError(f"{name} did not start")
        yield Running(name, ours)
    finally:
        ours.close()
        process.join(timeout=10)
        if process.is_alive():
            process.kill()
            process.join()


def make(name: str, work: Work) -> Peer:
    """Its libraries are imported here: another's weigh nothing on it."""
    if name == OURS:
        from bench.trainer.ours import Ours

        return Ours(work)
    if name == PLAIN:
        from bench.trainer.plain import Plain

        return Plain(work)
    from bench.trainer.trl_loop import Trl

    return Trl(work, by_call=name == TRL_CALL)


def high_water() -> int:
    """Bytes this process has held at most. `ru_maxrss` is of no use: a new process begins with
    that of the one that started it."""
    return _status("VmHWM")


def forget_high_water() -> None:
    """What is held now is the most from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def held() -> int:
    """Bytes this process holds now."""
    return _status("VmRSS")


def _serve(connection: Connection, name: str, work: Work, threads: int) -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="trl")
    peer = make(name, work)
    gc.collect()
    before = held()
    connection.send(True)
    try:
        while True:
            what, *arguments = connection.recv()
            if what == "memory":
                connection.send(Memory(before, high_water()))
            elif what == "step":
                gc.collect()
                start = time.perf_counter()
                peer.step()
                connection.send(time.perf_counter() - start)
            else:
                loss, found = gradients(peer)
                torch.save(found, arguments[0])
                del found
                # Copies of all gradients are the comparison's, not the step's.
                forget_high_water()
                connection.send(loss)
    except EOFError:
        # Process groups and trainers have nothing to write that would be missed.
        sys.exit(0)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"the system does not report {field}")
