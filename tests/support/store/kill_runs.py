"""The test's side of `killed_process`: victims made and killed at random, and what they report."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.store.killed_process import KillMoment
from support.system.module_environment import environment

Json = dict[str, Any]

_SEED = "TRACEGRAD_TEST_SEED"
# Some are killed while they open the store; some when they are seen to commit or to write, which
# take so little of their time that moments drawn blindly mostly miss them.
_OPENING_ONE_IN = 8
_AIMS = ("commit", "statements", None, None)


def drawn_seed() -> str:
    """Printed, and repeated by the environment's TRACEGRAD_TEST_SEED. The moments of kills are
    as random as the machine: the seed repeats what is written and when it ends, not where."""
    seed = os.environ.get(_SEED) or str(random.SystemRandom().randrange(10**9))
    print(f"{_SEED}={seed}")
    return seed


@dataclass
class KillCounts:
    """What the victims were doing when they were killed."""

    phases: Counter[str] = field(default_factory=Counter)
    acknowledgements: int = 0

    @classmethod
    def of(cls, killers: Iterable[RandomKiller]) -> KillCounts:
        sum_ = cls()
        for killer in killers:
            sum_.phases += killer.toll.phases
            sum_.acknowledgements += killer.toll.acknowledgements
        return sum_

    @property
    def kills(self) -> int:
        return self.phases.total()

    def __str__(self) -> str:
        where = ", ".join(f"{count} in {phase}" for phase, count in self.phases.most_common())
        return f"{self.kills} kills: {where}; {self.acknowledgements} acknowledgements"

    def check(self, kills: int) -> None:
        """So many kills, and they met what they were to meet."""
        assert self.kills == kills, f"{self.kills} kills in place of {kills}"
        for phase in ("statements", "commit"):
            assert self.phases[phase] >= kills // 20, f"next to none in {phase}: {self}"


class ForkServer:
    """One process that forks victims, one at a time."""

    def __init__(self, role: str, url: str, log: Path) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.store.killed_process", role, url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(),
                start_new_session=True,
            )

    def one(self, order: Json, hear: Callable[[list[Any]], None]) -> tuple[int, str]:
        """A victim's whole life; `hear` gets what it reports. Its exit status and last phase."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            match json.loads(line):
                case ["dead", status, phase]:
                    return status, phase
                case words:
                    hear(words)
        raise AssertionError(f"the victims' parent died: {self.log()}")

    def log(self) -> str:
        """The end of what it and its victims complained of."""
        return self._log.read_text()[-3000:]

    def close(self) -> None:
        """Ends a victim too that a failed test left alive."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@contextmanager
def fork_servers(role: str, url: str, folder: Path, count: int) -> Iterator[list[ForkServer]]:
    found = [ForkServer(role, url, folder / f"victims-{number}.log") for number in range(count)]
    try:
        yield found
    finally:
        for each in found:
            each.close()


@dataclass
class RandomKiller:
    """Makes and kills victims of one range; `order` says what the next one is to do."""

    range: ForkServer
    draw: random.Random
    order: Callable[[], Json]
    hear: Callable[[list[Any]], None]
    transactions: int  # how many a victim begins at most before its moment
    toll: KillCounts = field(default_factory=KillCounts)

    def kill(self, times: int) -> None:
        for _ in range(times):
            moment: KillMoment = {
                "from_start": self.draw.randrange(_OPENING_ONE_IN) == 0,
                "transactions": self.draw.randint(1, self.transactions),
                "wait": self.draw.random(),
                "aim": self.draw.choice(_AIMS),
            }
            order = {**self.order(), "kill": moment}
            status, phase = self.range.one(order, self._hear)
            assert status == -9, f"a victim ended by itself ({status}): {self.range.log()}"
            self.toll.phases[phase] += 1

    def _hear(self, words: list[Any]) -> None:
        self.toll.acknowledgements += 1
        self.hear(words)


def all_at_once(work: Sequence[Callable[[], None]]) -> None:
    """Each in a thread; raises what the first of them raised."""
    failures: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
