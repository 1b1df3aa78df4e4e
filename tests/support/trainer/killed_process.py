"""Ranks of `trainer step`, `serve` and `sft`, which may be killed: a process that has read torch
forks them.

Orders come as JSON lines, one run each: {"settings": FILE, "program": NAME, "ranks": N,
"steps": N or null, "after_s": SECONDS or null, "at": POINT or null, "nth": N, "linger_s": SECONDS,
"alone": BOOL, "env": {NAME: VALUE}}. Those of `serve` push to an engine, which runs
already. A run is killed `after_s` seconds after it began, or it kills itself `at` a point, the
`nth` time that it gets there, after it lingered there; `alone`: only one of its ranks, and the
others are ended as the launcher would. The answer is one line, the exit statuses.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tracegrad.store import Ledger
from tracegrad_trainer.engine.checkpoint import save_load
from tracegrad_trainer.inference import control_routes, proxy_control, weight_files, weight_swap
from tracegrad_trainer.inference.publish import WeightPublisher
from tracegrad_trainer.rl import offline_worker, serve_worker
from tracegrad_trainer.rl.train_loop import TrainLoop
from tracegrad_trainer.sft import train as sft
from tracegrad_trainer.utils.network import find_free_port

PROGRAMS = {"step": offline_worker.main, "serve": serve_worker.main, "sft": sft.main}

# Where a run may be killed: (owner, name of the function, whether before it runs).
POINTS: dict[str, tuple[Any, str, bool]] = {
    "before the copy": (save_load.CheckpointSaver, "start", True),
    "while it is written": (save_load, "save", True),
    "written, without its name": (save_load, "_finish", True),
    "whole, not committed": (save_load, "_finish", False),
    "before the commit": (Ledger, "commit_steps", True),
    "after the commit": (Ledger, "commit_steps", False),
    "before old ones go": (save_load.CheckpointSaver, "prune", True),
    "leased, not trained": (TrainLoop, "train_batch", True),
    "skipped groups consumed": (Ledger, "commit_skipped", False),
}
# The same of a push; a fourth part is an argument that the call must have.
PUSH_POINTS: dict[str, tuple[Any, ...]] = {
    "nothing sent": (WeightPublisher, "publish", True),
    "files written": (weight_files.WeightFiles, "write", False),
    "weights half ready": (control_routes.Peer, "post", True, "/update_weights"),
    "engine paused": (control_routes.VllmControl, "pause", False),
    "weights not in place": (control_routes.Peer, "post", True, "/finish_weight_update"),
    "loaded, version not set": (proxy_control.ProxyControl, "set_version", True),
    "version set, not resumed": (control_routes.Peer, "post", True, "/resume"),
    "served, not proven": (weight_swap.WeightSwap, "_verify", True),
    "proven, calls still wait": (proxy_control.ProxyControl, "release", True),
    "pushed, not recorded": (WeightPublisher, "publish", False),
}
EXPECTED = 120.0


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(run(order)), flush=True)


def run(order: dict[str, Any]) -> list[int]:
    port = find_free_port()
    ranks = [fork(order, rank, port) for rank in range(order["ranks"])]
    deadline = None if order["after_s"] is None else time.monotonic() + order["after_s"]
    return wait(ranks, deadline, alone=order["alone"])


def fork(order: dict[str, Any], rank: int, port: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        out = os.open(f"{order['settings']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ |= order["env"]
        if order["ranks"] > 1:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(order["ranks"]),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        if order["at"] is not None:
            arm(order["at"], order["nth"], order["linger_s"])
        steps = [] if order["steps"] is None else ["--steps", str(order["steps"])]
        code = PROGRAMS[order["program"]]([order["settings"], *steps])
    finally:
        os._exit(code)


def arm(point: str, nth: int, linger_s: float) -> None:
    """Makes this process kill itself at a point."""
    owner, name, before, *argument = (POINTS | PUSH_POINTS)[point]
    inner: Callable[..., Any] = getattr(owner, name)
    count = 0

    def end() -> None:
        time.sleep(linger_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def reached(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if argument and argument[0] not in args:
            return inner(*args, **kwargs)
        count += 1
        if before and count == nth:
            end()
        result = inner(*args, **kwargs)
        if count == nth:
            end()
        return result

    setattr(owner, name, reached)


def wait(ranks: list[int], deadline: float | None, *, alone: bool) -> list[int]:
    """Until all have ended; from `deadline` on, or when one was killed, they are killed."""
    left, statuses = list(ranks), dict.fromkeys(ranks, 0)
    latest = time.monotonic() + EXPECTED
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.remove(pid)
                statuses[pid] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if any(statuses.values()) or (deadline is not None and now > deadline) or now > latest:
            victims = [random.choice(left)] if alone and left == ranks else left
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return list(statuses.values())


if __name__ == "__main__":
    assert Path("/proc/self").exists(), "forks with threads running are not for other systems"
    main()
