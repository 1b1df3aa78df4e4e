"""`trainer serve` on this device: ten pushes while an agent works, the ranks killed in the middle,
and started again. And how far served log-probabilities are from the trainer's, fp8 too."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.gpu_check.check import Finding, Machine, judged
from bench.trainer.served_precision import HEADER, SERVED, measured_gaps
from tracegrad.store import Ledger, StepRecord, Store
from tracegrad_trainer.launch.run_state import read_state
from tracegrad_trainer.utils.network import find_free_port
from tracegrad_trainer.utils.subprocesses import ChildError

PUSHES, KILLED_AT = 10, 5


def check_served(machine: Machine) -> Finding:
    # What an earlier run has left would go on as this one's first steps.
    shutil.rmtree(machine.folder / "run", ignore_errors=True)
    port = find_free_port()
    # The agent reads the proxy's address when it is imported.
    os.environ["TRACEGRAD_URL"] = f"http://127.0.0.1:{port}"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shop = import_module("examples.shop.run")
    plan = shop.Plan(
        port=port, root=machine.folder / "models", state_dir=machine.folder / "run", steps=PUSHES
    )
    screen = import_module("examples.shop.screen").Screen()
    model = shop.warm_up(plan, screen)
    # The second run goes on from what the first one left, which the supervisor would do by itself.
    overrides = _settings(shop.SERVE, machine) | {"max_restarts": 0}
    killed = _train(shop, plan, model, screen, overrides, kill_at=KILLED_AT)
    done = _train(shop, plan, model, screen, overrides, kill_at=None)
    with Store.open(f"sqlite:///{plan.state_dir}/store.db", create=False) as store:
        steps = Ledger(store).steps()
        served = [v for v in store.versions() if v.state == "serving"]
    rows = [_row(step) for step in steps]
    numbers = [step.step for step in steps]
    gap = max((step.metrics.get("gap_p50", 0.0) for step in steps), default=0.0)
    right = killed and done and len(steps) >= PUSHES and numbers == list(range(1, len(steps) + 1))
    right = right and not any(step.metrics.get("mismatch") for step in steps)
    said = (
        f"{len(steps)} steps, {len(served)} versions served,"
        f" {'killed' if killed else 'NOT killed'} at {KILLED_AT}; median gap at most {gap:.1e} nats"
    )
    header = ("step", "seconds", "train", "push", "reward", "median gap")
    return judged(right, said, header, rows)


def _settings(demo: Mapping[str, object], machine: Machine) -> dict[str, object]:
    """Those of the demo; on a GPU who is where is chosen by the trainer itself."""
    if not machine.is_gpu:
        return dict(demo)
    own = ("ranks", "fsdp.threads", "vllm.kv_cache_memory_bytes")
    return {name: value for name, value in demo.items() if name not in own}


def _train(
    shop: Any,
    plan: Any,
    model: Path,
    screen: Any,
    overrides: Mapping[str, object],
    *,
    kill_at: int | None,
) -> bool:
    """Whether it came to its last step, or, with `kill_at`, was killed at that one."""
    from openai import OpenAIError  # of the agent: the other checks do without it

    served = import_module("examples.shop.stage").served
    with served(plan.port, model, plan.state_dir, overrides, lambda _: None) as stage:
        if kill_at is not None:
            threading.Thread(target=_kill, args=(stage, kill_at), daemon=True).start()
        try:
            asyncio.run(shop.learn(plan, stage, screen))
        except (ChildError, OpenAIError):
            return kill_at is not None
        return kill_at is None


def _kill(stage: Any, step: int) -> None:
    """Rank 0, with SIGKILL."""
    while stage.last_step < step:
        time.sleep(0.05)
    state = read_state(stage.state_dir, "ranks") or {}
    os.kill(state["pid"], signal.SIGKILL)


def _row(step: StepRecord) -> list[str]:
    seconds = step.metrics["seconds"]
    return [
        str(step.step),
        f"{sum(seconds.values()):.1f}",
        f"{seconds.get('train', 0):.2f}",
        f"{seconds.get('push', 0):.2f}",
        f"{step.metrics['reward_mean']:.2f}",
        f"{step.metrics.get('gap_p50', 0):.1e}",
    ]


def check_precision(machine: Machine) -> Finding:
    # In bfloat16 the pushes by each transport were held against the trainer before.
    asked = ["float32"] if machine.tiny else [name for name in SERVED if name != "bfloat16"]
    return judge_precision(asked, measured_gaps(asked))


def judge_precision(asked: Sequence[str], rows: list[list[str]]) -> Finding:
    """Right: each dtype that was asked for serves, every right push is within its bounds, and the
    stale one is refused."""
    wrong = []
    for dtype in asked:
        verdicts = {(push, verdict) for name, push, *_, verdict in rows if name == dtype}
        if verdicts != {("right", "within"), ("first block stale", "refused")}:
            wrong.append(dtype)
    said = f"{len(asked) - len(wrong)} of {len(asked)} dtypes served as they should be"
    return judged(not wrong, said + (f", not {', '.join(wrong)}" if wrong else ""), HEADER, rows)
