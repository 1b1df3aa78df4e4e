"""What each process of a `trainer serve` takes, and what lies on the disk, every few seconds."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tracegrad.proxy.store_writer.child import PROCESS_NAME

EVERY_S = 5.0
# Processes of vLLM are not ours.
PROXY = ("proxy", "proxy workers", "proxy writers")
OURS = ("trainer serve", *PROXY, "rank launcher", "ranks", "scorers")
VLLM = ("vLLM server", "vLLM engine")
_METRICS = (
    "calls_in_flight",
    "calls_waiting",
    "turns_committed_total",
    "turns_lost_total",
    "gate_held_seconds_total",
    "policy_version",
)
_PREFIX = "tracegrad_proxy_"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all processes of a role. `rss_mib`: resident, pages that they share counted in each;
    `anonymous_mib`: of that, what belongs to no file. `cpu_s`: since they started."""

    processes: int
    rss_mib: float
    anonymous_mib: float
    fds: int
    threads: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """`at`: seconds since the epoch. `disk_mib`: by folder of the run, and its store with the log
    of what is not yet in it. `checkpoints`: how many there are. `metrics`: of the proxy, summed
    over labels."""

    at: float
    roles: Mapping[str, Usage]
    disk_mib: Mapping[str, float]
    checkpoints: int
    metrics: Mapping[str, float]


def samples_in(path: Path) -> list[Sample]:
    with path.open() as file:
        return [_read(json.loads(line)) for line in file]


def _read(line: dict[str, Any]) -> Sample:
    roles = {role: Usage(**usage) for role, usage in line.pop("roles").items()}
    return Sample(roles=roles, **line)


class Sampler:
    """A thread, in a `with`; `file` gets a line of JSON a sample."""

    def __init__(self, pid: int, state_dir: Path, url: str, file: Path) -> None:
        """`pid`: of `trainer serve`. `url`: of its proxy."""
        self._root, self._state_dir, self._file = psutil.Process(pid), state_dir, file
        self._http = httpx.Client(base_url=url, timeout=30, trust_env=False)
        self._seen = {self._root}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self._http.close()

    def left(self) -> list[str]:
        """Command lines of those that were seen and still run."""
        lines = []
        for process in self._seen:
            with suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    lines.append(" ".join(process.cmdline())[:200])
        return lines

    def _run(self) -> None:
        with self._file.open("a") as file:
            due = time.monotonic()
            while not self._over.wait(max(0.0, due - time.monotonic())):
                file.write(json.dumps(asdict(self.sample())) + "\n")
                file.flush()
                due += EVERY_S

    def sample(self) -> Sample:
        roles: dict[str, list[Usage]] = defaultdict(list)
        for role, process in _by_role(self._root):
            self._seen.add(process)
            # Any of them may end meanwhile.
            with suppress(psutil.Error, OSError, KeyError):
                roles[role].append(_usage(process))
        checkpoints = self._state_dir / "checkpoints"
        return Sample(
            at=time.time(),
            roles={role: _sum(some) for role, some in roles.items()},
            disk_mib=_disk(self._state_dir),
            checkpoints=len(list(checkpoints.iterdir())) if checkpoints.exists() else 0,
            metrics=self._metrics(),
        )

    def _metrics(self) -> dict[str, float]:
        try:
            text = self._http.get("/metrics").raise_for_status().text
        except httpx.HTTPError:
            return {}  # calls that fail are counted where they are made
        found: dict[str, float] = dict.fromkeys(_METRICS, 0.0)
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                if (name := one.name.removeprefix(_PREFIX)) in found:
                    found[name] += one.value
        return found


def _by_role(root: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    yield "trainer serve", root
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    lines: dict[int, str] = {}
    for process in _below(root):
        with suppress(psutil.Error):
            children[process.ppid()].append(process)
            lines[process.pid] = " ".join(process.cmdline())
    for child in children[root.pid]:
        line = lines.get(child.pid, "")
        role = next((role for mark, role in _MARKS.items() if mark in line), "others")
        yield role, child
        below = [one for one in children[child.pid] if "tracker" not in lines.get(one.pid, "")]
        if role == "vLLM server" and below:
            engine = max(below, key=_rss)
            yield "vLLM engine", engine
        elif role == "rank launcher":
            yield from (("ranks", one) for one in below)
        elif role == "proxy":
            # Each event loop has a writer; of several loops, which are the proxy's children, those
            # of an SQLite store have one together.
            for one in (*below, *(child for worker in below for child in children[worker.pid])):
                with suppress(psutil.Error):
                    yield "proxy writers" if one.name() == PROCESS_NAME else "proxy workers", one


# The launcher's command line has the program of its ranks too.
_MARKS = {
    "vllm.entrypoints": "vLLM server",
    "tracegrad.cli proxy": "proxy",
    "torch.distributed.run": "rank launcher",
    "rl.serve_worker": "ranks",
    "rewards": "scorers",
}


def _below(root: psutil.Process) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = root.children(recursive=True)
    except psutil.Error:
        return []
    return found


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _usage(process: psutil.Process) -> Usage:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    times = process.cpu_times()
    return Usage(
        processes=1,
        rss_mib=int(status["VmRSS"].split()[0]) / 1024,
        anonymous_mib=int(status["RssAnon"].split()[0]) / 1024,
        fds=len(os.listdir(f"/proc/{process.pid}/fd")),
        threads=int(status["Threads"]),
        cpu_s=times.user + times.system,
    )


def _sum(some: list[Usage]) -> Usage:
    def of(field: Callable[[Usage], float]) -> float:
        return sum(map(field, some))

    return Usage(
        processes=len(some),
        rss_mib=of(lambda one: one.rss_mib),
        anonymous_mib=of(lambda one: one.anonymous_mib),
        fds=sum(one.fds for one in some),
        threads=sum(one.threads for one in some),
        cpu_s=of(lambda one: one.cpu_s),
    )


def _disk(state_dir: Path) -> dict[str, float]:
    sizes: dict[str, float] = defaultdict(float)
    for folder, _, files in os.walk(state_dir):
        parts = Path(folder).relative_to(state_dir).parts
        for file in files:
            name = parts[0] if parts else "store" if file.startswith("store.db") else "others"
            # Checkpoints come and go.
            with suppress(OSError):
                sizes[name] += os.stat(os.path.join(folder, file)).st_size / _MIB
    return dict(sizes)
