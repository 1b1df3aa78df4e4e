"""torchrun's launchers as several hosts have them: what of their ranks begins again meets again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.packages.wheel import ROOT
from support.proxy.servers import eventually
from support.system.module_environment import environment
from tracegrad_trainer.utils.network import find_free_port

pytestmark = pytest.mark.timeout(900)

PROGRAM = ROOT / "tests" / "support" / "trainer" / "meeting_ranks.py"


@dataclass
class Launcher:
    folder: Path
    command: list[str]
    late_s: float
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self) -> None:
        self.starts += 1
        variables = {"OMP_NUM_THREADS": "1", "LATE_S": str(self.late_s)}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, str(PROGRAM), str(self.folder)],
                stdout=log,
                stderr=log,
                env={**os.environ, **environment(), **variables},
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def kill(self) -> None:
        """With its rank, which is a session of its own."""
        if self.process is None:
            return
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with suppress(OSError):
            for pid in map(int, children.read_text().split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(30)


@dataclass
class Cluster:
    folder: Path
    launchers: list[Launcher]

    def noted(self, word: str) -> list[int]:
        """How often, of each rank."""
        notes = [self.folder / f"rank-{rank}" for rank in range(len(self.launchers))]
        return [note.read_text().count(word) if note.exists() else 0 for note in notes]

    def until(self, done: Callable[[], bool]) -> None:
        """As systemd and the kubelet do: a launcher that ended is started anew."""

        def look() -> bool:
            if done():
                return True
            for launcher in self.launchers:
                if launcher.has_ended():
                    launcher.start()
            return False

        try:
            eventually(look, 300)
        except AssertionError as error:
            log = (self.folder / "log").read_text()[-4000:]
            raise AssertionError(f"{self.noted('begun')} {self.noted('met')}\n{log}") from error

    def end(self) -> None:
        (self.folder / "end").touch()
        for launcher in self.launchers:
            assert launcher.process is not None
            assert launcher.process.wait(60) == 0, (self.folder / "log").read_text()[-4000:]


@contextmanager
def cluster(folder: Path, *, hosts: int, restarts: int) -> Iterator[Cluster]:
    """Its ranks have met, ended, and met again."""
    shared = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    shared += [f"--nnodes={hosts}", f"--max-restarts={restarts}"]
    shared += [f"--rdzv-endpoint=127.0.0.1:{find_free_port()}"]
    launchers = [
        Launcher(folder, [*shared, f"--node-rank={node}"], late_s=0.7 * node)
        for node in range(hosts)
    ]
    made = Cluster(folder, launchers)
    try:
        for launcher in launchers:
            launcher.start()
        made.until(lambda: made.noted("met") == [2] * hosts)
        yield made
    finally:
        for launcher in launchers:
            launcher.kill()


def test_ranks_that_all_end_meet_again_at_once(tmp_path: Path) -> None:
    with cluster(tmp_path, hosts=3, restarts=10) as made:
        assert made.noted("begun") == [2, 2, 2]  # no attempt was lost
        made.end()


@pytest.mark.parametrize("restarts", [10, 0])
def test_a_new_launcher_in_the_store_of_an_old_one(tmp_path: Path, restarts: int) -> None:
    """Its rank waits until rank 0 notices that its peer is gone."""
    with cluster(tmp_path, hosts=2, restarts=restarts) as made:
        first, second = made.launchers
        before, starts = made.noted("begun")[1], first.starts
        second.kill()
        second.start()
        made.until(lambda: made.noted("begun")[1] == before + 1)
        (tmp_path / "notice").touch()
        made.until(lambda: made.noted("begun")[0] == before + 1)
        (tmp_path / "notice").unlink()
        made.until(lambda: made.noted("met") == [3, 3])
        assert (first.starts == starts) is (restarts > 0)
        made.end()


def test_a_launcher_whose_store_is_gone_ends_and_meets_the_new_one(tmp_path: Path) -> None:
    with cluster(tmp_path, hosts=2, restarts=10) as made:
        first, second = made.launchers
        first.kill()
        first.start()
        made.until(lambda: made.noted("met") == [3, 3])
        assert second.starts == 2
        made.end()
