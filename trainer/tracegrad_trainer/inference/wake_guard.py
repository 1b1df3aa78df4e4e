"""A process beside rank 0 that keeps calls waiting while vLLM sleeps, and wakes it if rank 0 ends.

A step may take longer than a hold of the proxy's lasts, and its thread may be in one long call: so
it is another process that renews the hold. A trainer that fails, is killed, or is stopped with
Ctrl-C leaves vLLM asleep: this process notices by the end of its input, and brings back what was
served before. It does so only then, whatever rank 0 ended of, for the GPUs' memory is free when
the ranks are gone, and not while one of them handles its error.

What it must do it is told before each thing that could go wrong, one JSON line, which it answers.
"""

from __future__ import annotations

import json
import logging
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tracegrad.log_format import write_log
from tracegrad_trainer.inference.control_routes import (
    EngineLostError,
    PushError,
    ServedWeights,
    SleepLevel,
    VllmControl,
)
from tracegrad_trainer.inference.proxy_control import ProxyControl
from tracegrad_trainer.launch.folder_lock import FolderLockedError, lock_for_ranks

logger = logging.getLogger("tracegrad_trainer.inference.wake_guard")

# A hold is renewed when a third of it is over; an answer to that takes milliseconds.
RENEWALS = 3
RENEW_TIMEOUT_S = 10.0
# What a trainer that is started meanwhile says: it need but be started again.
HOLDER = "the guard that wakes vLLM after a trainer that ended, and is soon done"
# Other ranks hold their GPUs' memory longer than rank 0 lives: in a collective they hear no signal,
# and torchrun kills them only after 30 s.
ATTEMPTS, PAUSE_S = 13, 5.0


@dataclass(frozen=True, slots=True)
class GuardedEngine:
    """Whom it calls. `state_dir`: while it wakes vLLM, no other trainer begins there.
    `sleep_level`: of vLLM's sleep while the ranks train."""

    vllm_url: str
    proxy_urls: Sequence[str]
    proxy_key: str | None
    hold_ttl_s: float
    timeout_s: float
    state_dir: str
    sleep_level: SleepLevel


@dataclass(frozen=True, slots=True)
class WakePlan:
    """What to do if rank 0 ends now.

    Attributes:
        served: with which calls go on: what the engine has, or what was served before.
        load: the engine has not kept these weights.
        open_gate: calls may go on with them at once; not before a first push, when nobody has said
            that weights which the engine has kept are those of the proxy's version.
        folder: of the weight files, removed at the end.
    """

    served: ServedWeights
    load: bool
    open_gate: bool
    folder: str

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> WakePlan:
        served = ServedWeights(fields["served"]["version"], tuple(fields["served"]["paths"]))
        return cls(served, fields["load"], fields["open_gate"], fields["folder"])


class WakeGuard:
    """Rank 0's end of it: the process, started with the first plan and again if it has ended."""

    def __init__(self, engine: GuardedEngine, lock: int | None = None) -> None:
        """`lock`: a descriptor that keeps the weight files from being removed as left behind by
        this process; it is the guard's as well."""
        self._engine = engine
        self._lock = lock
        self._process: subprocess.Popen[str] | None = None

    def arm(self, plan: WakePlan) -> None:
        """From now on calls are kept waiting, and `plan` is carried out if this process ends.

        Raises:
            PushError: the guard does not start.
        """
        if self._process is not None and self._told(asdict(plan)):
            return
        if self._process is not None:
            logger.warning("the process that guards vLLM's sleep has ended; it is started again")
        self._start()
        if not self._told(asdict(self._engine)) or not self._told(asdict(plan)):
            raise PushError("the process that guards vLLM's sleep does not start; see the log")

    def disarm(self) -> None:
        """vLLM is awake. When this returns, nothing is renewed any more."""
        if self._process is not None:
            self._told(None)

    def close(self) -> None:
        """Not while it is armed: then it must outlive this process."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        # A session of its own: neither a terminal's Ctrl-C nor a launcher that ends a rank's
        # process group may end it with the rank.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tracegrad_trainer.inference.wake_guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=() if self._lock is None else (self._lock,),
        )

    def _told(self, order: dict[str, Any] | None) -> bool:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError:
            return False
        return bool(self._process.stdout.readline())


def watch(orders: IO[str], answers: IO[str], engine: GuardedEngine) -> WakePlan | None:
    """Renews the hold while there is a plan, until the orders end; the plan at that time."""
    proxy = ProxyControl(
        engine.proxy_urls,
        RENEW_TIMEOUT_S,
        key=engine.proxy_key,
        hold_ttl_s=engine.hold_ttl_s,
    )
    every_s = engine.hold_ttl_s / RENEWALS
    plan: WakePlan | None = None
    due = time.monotonic()
    while True:
        left_s = None if plan is None else max(0.0, due - time.monotonic())
        # Each line is answered before the next is written: none can be hidden in a buffer.
        if not select.select([orders], [], [], left_s)[0]:
            renew(proxy)
            due = time.monotonic() + every_s
            continue
        line = orders.readline()
        if not line:
            return plan
        if (fields := json.loads(line)) is None:
            plan = None
        else:
            due = due if plan is not None else time.monotonic() + every_s
            plan = WakePlan.parse(fields)
        print("ok", file=answers, flush=True)


def renew(proxy: ProxyControl) -> None:
    try:
        proxy.hold(drain_s=0)
    except PushError as error:
        logger.warning("calls may not wait for vLLM any more: %s", error)


def bring_back(
    plan: WakePlan, vllm: VllmControl, proxy: ProxyControl, *, level: SleepLevel
) -> None:
    """What was served before is served again, however far a push had come.

    Raises:
        PushError, EngineLostError: as `control_routes`. May be called again.
    """
    # Asleep, half awake, or paused with half of the new weights: now it sleeps, with its scheduler
    # stopped. What it has kept stays. At level 1 also what is loaded again: it may be an adapter
    # alone, and the weights beneath it are nowhere else.
    vllm.sleep(level if plan.load else 1)
    vllm.wake("weights")
    if plan.load:
        vllm.load(plan.served)
    if plan.load or plan.open_gate:
        # Kept weights too: a proxy that was started again meanwhile knows no version. Loaded ones
        # before a first push too: its number is an earlier run's, and not of these. Requests that
        # wait in the engine go on now, and calls when the hold ends.
        proxy.set_version(plan.served.number)
    vllm.wake("kv_cache")
    vllm.resume()
    if plan.open_gate:
        proxy.release()


def wake(plan: WakePlan, engine: GuardedEngine, *, pause_s: float = PAUSE_S) -> None:
    """`bring_back`, again while vLLM refuses. Raises PushError, EngineLostError."""
    vllm = VllmControl(engine.vllm_url, engine.timeout_s)
    proxy = ProxyControl(
        engine.proxy_urls,
        engine.timeout_s,
        key=engine.proxy_key,
        hold_ttl_s=engine.hold_ttl_s,
    )
    for attempt in range(ATTEMPTS):
        renew(proxy)
        try:
            bring_back(plan, vllm, proxy, level=engine.sleep_level)
            return
        except EngineLostError:
            raise  # it is gone: nobody to wake
        except PushError as error:
            if attempt == ATTEMPTS - 1:
                raise
            logger.warning("vLLM does not wake yet: %s", error)
            time.sleep(pause_s)


def main() -> int:
    write_log("wake_guard", text="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    engine = GuardedEngine(**json.loads(sys.stdin.readline()))
    print("ok", flush=True)
    plan = watch(sys.stdin, sys.stdout, engine)
    if plan is None:
        return 0
    known = plan.load or plan.served.version >= 0
    serves = f"version {plan.served.number}" if known else "what it had"
    try:
        with lock_for_ranks(Path(engine.state_dir), HOLDER):
            wake(plan, engine)
    except FolderLockedError:
        logger.info("the trainer ended while vLLM slept; another one has begun, and wakes it")
        return 0
    except PushError as error:
        logger.error("the trainer ended while vLLM slept, and vLLM does not wake: %s", error)
        return 1
    else:
        logger.warning("the trainer ended while vLLM slept: it is awake and serves %s", serves)
        return 0
    finally:
        shutil.rmtree(plan.folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
