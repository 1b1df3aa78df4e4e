"""`trainer serve`: starts vLLM, the proxy and the FSDP ranks, watches them, stops them together.

Nothing here touches a tensor. The supervisor owns the order: what can be checked is checked
before anything starts; then all three start at once, since each spends its time importing. The
ranks stop first, so that a step under way is committed and its push finished; vLLM goes last.
"""

from __future__ import annotations

import errno
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from rich.console import Console

from tracegrad.store import Ledger, Store, StoreError
from tracegrad_trainer.children import Child, ChildError, answers
from tracegrad_trainer.endpoint.process import VllmProcess
from tracegrad_trainer.report import step_line
from tracegrad_trainer.run_state import RunState, read_state
from tracegrad_trainer.settings import TrainerSettings

READY_TIMEOUT_S = 900.0
RANKS_GRACE_S = 30.0


class Stopped(BaseException):
    """SIGTERM or SIGINT: not an error, and nothing on the way may swallow it."""


class ServeError(RuntimeError):
    """Why nothing was started, in one line."""


def serve(settings: TrainerSettings, console: Console) -> int:
    """Runs until it is stopped (0), `max_steps` is done (0), or a part dies (1: one line says)."""
    try:
        with stop_signals(), Stack(settings, console) as stack:
            stack.start()
            stack.watch()
    except Stopped:
        console.print("stopped; everything captured is in the store")
    except (ServeError, ChildError, StoreError) as error:
        console.print(f"trainer serve: {error}", style="red", highlight=False, soft_wrap=True)
        return 1
    return 0


@contextmanager
def stop_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise Stopped, once: a second Ctrl-C must not cut the stopping short."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Stopped

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Stack:
    """vLLM, the proxy and the ranks as one thing."""

    def __init__(self, settings: TrainerSettings, console: Console) -> None:
        self.settings = settings
        self.console = console
        self.state = RunState(settings.state_dir, "serve")
        self.store: Store | None = None
        self.children: list[Child] = []

    def __enter__(self) -> Stack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.state.update(stage="stopping")
        for child in reversed(self.children):
            child.stop(grace_s=RANKS_GRACE_S if child.name == "ranks" else 10)
        if self.store is not None:
            self.store.close()
        self.state.update(stage="stopped")

    def start(self) -> None:
        """Raises ServeError before anything runs, ChildError when a part does not come up."""
        settings = self.settings
        check_port(settings.proxy.host, settings.proxy.port, "proxy.port")
        check_port("127.0.0.1", settings.vllm.port, "vllm.port")
        self.store = Store.open(settings.proxy.store)
        resolved = write_resolved(settings)
        self.state.update(stage="starting", url=settings.url, store=settings.proxy.store)

        vllm = VllmProcess(settings.vllm)
        proxy = proxy_child(settings)
        ranks = ranks_child(settings, resolved)
        self.children = [vllm, proxy, ranks]
        for child in self.children:
            child.log.unlink(missing_ok=True)
            child.start()
        self._await(proxy, lambda: answers(f"{settings.url}/healthz"))
        self._await(vllm, lambda: answers(f"{settings.vllm.url}/health"))
        self._await(ranks, self._first_push_done)
        self.state.update(stage="serving")
        self.console.print(f"serving {settings.url}/v1 · logs: {settings.logs}", highlight=False)

    def watch(self) -> None:
        """Prints a line a step, until the ranks are done or a part dies (ChildError)."""
        assert self.store is not None
        ledger = Ledger(self.store)
        last = ledger.last_step()
        shown = last.step if last else 0
        while True:
            finished = self.children[-1].exit_code() == 0
            for step in reversed(ledger.steps(limit=20)):
                if step.step > shown:
                    self.console.print(step_line(step), highlight=False)
                    shown = step.step
            if finished:
                return
            for child in self.children:
                child.check()
            time.sleep(0.5)

    def _await(self, child: Child, ready: Callable[[], bool]) -> None:
        """Waits for `child`; the death of any other one meanwhile counts too."""

        def others() -> None:
            for other in self.children:
                other.check()

        with self.console.status(f"waiting for {child.name}"):
            seconds = child.wait_ready(ready, timeout_s=READY_TIMEOUT_S, tick=others)
        self.console.print(
            f"{child.name} ready (pid {child.pid}, {seconds:.0f} s)", highlight=False
        )

    def _first_push_done(self) -> bool:
        state = read_state(self.settings.state_dir, "ranks")
        return state is not None and state["alive"] and state.get("stage") == "waiting"


def proxy_child(settings: TrainerSettings) -> Child:
    """`tracegrad proxy` in front of our vLLM. Its key, if any, stays out of the process list."""
    proxy = settings.proxy
    command = [sys.executable, "-m", "tracegrad.cli", "proxy"]
    command += ["--upstream", settings.vllm.url, "--store", proxy.store]
    command += ["--host", proxy.host, "--port", str(proxy.port)]
    command += ["--model", proxy.model or settings.vllm.served_model_name]
    return Child("proxy", command, log=settings.logs / "proxy.log")


def ranks_child(settings: TrainerSettings, resolved: Path) -> Child:
    """The FSDP ranks under torch.distributed's elastic agent, behind vLLM in the scheduler."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={settings.ranks}", "--max-restarts=0"]
    command += ["--module", "tracegrad_trainer.worker", str(resolved)]
    return Child("ranks", command, log=settings.logs / "ranks.log", nice=5)


def write_resolved(settings: TrainerSettings) -> Path:
    """The resolved settings as the ranks read them; for our eyes only."""
    path = settings.state_dir / "run" / "settings.json"
    path.touch(mode=0o600)
    path.write_text(settings.model_dump_json(indent=2))
    return path


def check_port(host: str, port: int, field: str) -> None:
    """Raises ServeError if somebody listens there already."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ServeError(f"{field}: cannot listen on {host}:{port}: {error}") from None
            raise ServeError(
                f"{field}: port {port} is in use; stop what listens there or take another"
                f" (--set {field}=...)"
            ) from None
