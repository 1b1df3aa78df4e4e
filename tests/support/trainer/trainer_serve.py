"""A real `trainer serve` as a subprocess: started, waited for, signalled, looked at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from support.system.process_tree import ProcessTree
from tracegrad.store import Ledger, Store
from tracegrad_trainer.launch.run_state import read_state
from tracegrad_trainer.utils.network import find_free_port

BIN = Path(sys.executable).parent
READY_S = 180.0
STOP_S = 60.0

# Small enough that a step takes a second on one core.
TINY: Mapping[str, object] = {
    "ranks": 2,
    "batches.groups": 2,
    "batches.group_size": 4,
    "batches.tokens_per_micro_batch": 1024,
    "data.tags": '{"split": "train"}',
    "optim.lr": 1e-3,
    "fsdp.reshard": "false",
    "fsdp.threads": 1,
    "vllm.max_model_len": 512,
    "vllm.kv_cache_memory_bytes": 64 << 20,
}


@dataclass
class TrainerServe:
    """One run."""

    state_dir: Path
    settings: Mapping[str, object]
    proxy_port: int = field(default_factory=find_free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.proxy_port}"

    @property
    def vllm_url(self) -> str:
        """Known once it runs."""
        state = read_state(self.state_dir, "serve") or {}
        return str(state["engine"])

    @property
    def store_url(self) -> str:
        return f"sqlite:///{self.state_dir}/store.db"

    def start(self) -> None:
        settings = {
            "state_dir": self.state_dir,
            "proxy.port": self.proxy_port,
            **TINY,
            **self.settings,
        }
        sets = [f"--set={name}={value}" for name, value in settings.items()]
        # A session of its own, as a terminal gives one: its signals reach only whom we name.
        self.process = subprocess.Popen(
            [str(BIN / "trainer"), "serve", *sets],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            umask=0,  # what it writes is private all the same
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        )
        self.family = ProcessTree(self.process.pid)

    def is_serving(self) -> bool:
        state = read_state(self.state_dir, "serve") or {}
        return state.get("pid") == self.process.pid and state.get("stage") == "serving"

    def wait_serving(self) -> None:
        self.wait(self.is_serving, READY_S)

    def wait(self, what: Callable[[], object], within_s: float = 120.0) -> None:
        """Until `what` is true; AssertionError with the output if it ends before, or too late."""
        deadline = time.monotonic() + within_s
        while not what():
            if self.process.poll() is not None:
                raise AssertionError(f"trainer serve ended: {self.process.communicate()[0]}")
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def pid_of(self, child: str) -> int:
        """`vllm`, `proxy`, or `ranks` for rank 0, as a person finds them."""
        if child == "ranks":
            return int((read_state(self.state_dir, "ranks") or {})["pid"])
        [pid] = [
            process.pid
            for process in self.family.alive()
            if process.ppid() == self.process.pid
            and {"vllm": "vllm.entrypoints", "proxy": "tracegrad.cli"}[child]
            in " ".join(process.cmdline())
        ]
        return pid

    def engine_pid(self) -> int:
        """vLLM's largest child: the process of the engine."""
        server = psutil.Process(self.pid_of("vllm"))
        return int(max(server.children(), key=lambda child: child.memory_info().rss).pid)

    def doing(self) -> str:
        return str((read_state(self.state_dir, "ranks") or {}).get("stage", ""))

    def last_step(self) -> int:
        with Store.open(self.store_url, create=False) as store:
            step = Ledger(store).last_step()
        return step.step if step else 0

    def is_idle_after(self, *, step: int) -> bool:
        """Whether the trainer has made `step`, has served it, and waits for more."""
        with Store.open(self.store_url, create=False) as store:
            made = Ledger(store).last_step()
            served = store.current_version()
        waits = self.doing() == "waiting"
        return made is not None and made.step >= step and served == made.version and waits

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, within_s: float = STOP_S) -> Ended:
        """How it ended. AssertionError with the logs if it does not."""
        try:
            output, _ = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"trainer serve does not end: {self.logs()}") from None
        return Ended(self.process.returncode, output, self.family.gone(within_s=30))

    def logs(self) -> str:
        files = sorted((self.state_dir / "logs").glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in files)


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    left: list[str]  # processes that are still there

    @property
    def lines(self) -> list[str]:
        return [line.strip() for line in self.output.splitlines() if line.strip()]

    @property
    def last_line(self) -> str:
        return self.lines[-1] if self.lines else ""

    def is_clean(self) -> None:
        """Nothing left behind, no traceback."""
        assert self.left == []
        assert "Traceback" not in self.output


@contextmanager
def trainer_serve(state_dir: Path, settings: Mapping[str, object]) -> Iterator[TrainerServe]:
    """Started, not awaited; whatever is left of it at the end is killed."""
    run = TrainerServe(state_dir, settings)
    run.start()
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()
        run.family.end()


def cli(*command: str) -> str:
    """What a command of ours prints. AssertionError if it fails."""
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def cli_json(*command: str) -> Any:
    return json.loads(cli(*command))
