"""A process whose forks write to a store until they are killed, one after the other.

Started as `python -m support.store.killed_process ROLE URL`. Each line on its standard input is an
order (JSON); it forks a process, which does as its role says and reports each acknowledgement, and
kills it at the order's moment (`Moment`). All of them write whole lines to one pipe, so what a
victim reported before its death stands before the line that says it is dead.

Forks save the second that Python and SQLAlchemy take to load, so that hundreds of kills fit
into a test.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypedDict

from sqlalchemy import Connection

from support.store.workload import Submission, WriterAgents
from tracegrad.store import (
    AlreadyTrained,
    Group,
    GroupCommitWriter,
    LeaseLost,
    Ledger,
    LedgerError,
    StepRecord,
    Store,
    lease_by_rollout,
)
from tracegrad.store.errors import StoreUnavailable

Json = dict[str, Any]
Transaction = Callable[[], AbstractContextManager[Connection]]

# Where a victim is; kept in memory that its killer shares.
PHASES = ("opening", "between", "preparing", "statements", "commit")
LEASE_S = 0.12
GROUPS, GROUP_SIZE = 2, 2


class KillMoment(TypedDict, total=False):
    """When a victim is killed, in its own progress: a slow machine kills it no earlier.

    After its first acknowledgement it begins `transactions` more, and then there pass `wait` times
    the seconds that one of them took it on average (without any: `wait_s`). With `from_start`
    there pass `wait` times the seconds that the victims before it took to open the store. With
    `aim` it is killed as soon after that as it is in that phase, or a second later.
    """

    from_start: bool
    transactions: int
    wait: float
    wait_s: float
    aim: str | None


class SharedProgress:
    """What a victim leaves behind in memory: its phase, how many transactions it has begun, and
    whether it has reported anything."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    def reset(self) -> None:
        self._memory[:] = bytes(8)

    def enter(self, phase: str) -> None:
        self._memory[0] = PHASES.index(phase)
        if phase == "statements":  # threads may miss one of each other's
            self._memory[4:8] = (self.transactions + 1).to_bytes(4, "little")

    def report(self, *words: object) -> None:
        self._memory[1] = 1
        report(*words)

    @property
    def transactions(self) -> int:
        return int.from_bytes(self._memory[4:8], "little")

    @property
    def phase(self) -> str:
        return PHASES[self._memory[0]]

    @property
    def reported(self) -> bool:
        return self._memory[1] == 1


def report(*words: object) -> None:
    """One line, in one piece: many threads and processes write to the pipe."""
    line = json.dumps(words) + "\n"
    assert len(line) < 4096, "longer writes to a pipe are not whole"
    os.write(1, line.encode())


def write(url: str, order: Json, shared: SharedProgress) -> None:
    """`order["agents"]`: name -> [rollout, wave] to go on with; they write for ever."""
    with Store.open(url) as store:
        watch(store, shared)

        def acknowledged(parcel: Submission) -> None:
            shared.report("ack", parcel.agent, *parcel.place)

        def refused(error: StoreUnavailable) -> None:
            report("refused", str(error))

        with GroupCommitWriter(store) as writer:
            agents = {name: (place[0], place[1]) for name, place in order["agents"].items()}
            for thread in WriterAgents(writer, order["seed"], acknowledged, refused).start(agents):
                thread.join()


def create_store(url: str, order: Json, shared: SharedProgress) -> None:
    """A new store at `order["url"]`."""
    shared.report("begins")
    Store.open(order["url"]).close()
    shared.report("made")
    time.sleep(60)


def train(url: str, order: Json, shared: SharedProgress) -> None:
    """Lease, "train", commit, for ever or (`order["until_all"]`) until all is consumed.

    Each step says itself which turns it is made of; it is reported once it is committed.
    """
    draw = random.Random(order["seed"])
    with Store.open(url) as store:
        watch(store, shared)
        ledger = Ledger(store)
        shared.report("open")
        while True:
            groups = ledger.lease(
                groups=GROUPS,
                group_size=GROUP_SIZE,
                owner=order["owner"],
                ttl_s=LEASE_S,
                at_least=1,
            )
            if groups:
                _step(ledger, groups, draw)
            elif order.get("until_all") and not store.turn_counts().pending:
                return
            else:
                time.sleep(0.005)


def _step(ledger: Ledger, groups: list[Group], draw: random.Random) -> None:
    turns = [turn.turn_id for group in groups for each in group.rollouts for turn in each.turns]
    # Sometimes past the lease: somebody else has the same groups then.
    time.sleep(1.3 * LEASE_S if draw.random() < 0.15 else draw.uniform(0, 0.01))
    skipped = {turn: "filtered" for turn in turns if draw.random() < 0.2}
    trained = [turn for turn in turns if turn not in skipped]
    rollouts = [each.rollout_id for group in groups for each in group.rollouts]
    if draw.random() < 0.1:
        ledger.release(groups)
        return
    while True:
        last = ledger.last_step()
        number = last.step + 1 if last else 1
        mine = {"trained": trained, "skipped": list(skipped)}
        try:
            ledger.commit_step(
                StepRecord(step=number, version=number, metrics=mine),
                trained=trained,
                skipped=skipped,
                rollouts=rollouts,
                leases=lease_by_rollout(groups),
            )
        except (AlreadyTrained, LeaseLost) as error:
            report("refused", str(error))
            return
        except LedgerError as error:
            if "is in the ledger already" not in str(error):
                raise
        else:
            report("step", number, trained, list(skipped))
            return


ROLES: dict[str, Callable[[str, Json, SharedProgress], None]] = {
    "write": write,
    "make": create_store,
    "train": train,
}


def watch(store: Store, shared: SharedProgress) -> None:
    """Have the store's transactions say where they are."""
    append = store.append

    def watched(begin: Transaction) -> Transaction:
        @contextmanager
        def transaction() -> Iterator[Connection]:
            with begin() as connection:
                shared.enter("statements")
                yield connection
                shared.enter("commit")
            shared.enter("between")

        return transaction

    def preparing(events: Any, **more: Any) -> None:
        shared.enter("preparing")
        append(events, **more)

    store.append = preparing  # type: ignore[method-assign]
    store.appending = watched(store.appending)  # type: ignore[method-assign]
    store.exclusive = watched(store.exclusive)  # type: ignore[method-assign]


def main() -> None:
    role, url = sys.argv[1:]
    with Store.open(url) as store:
        store.rollouts(limit=1)  # loads what forks would load again
    shared, opening_s = SharedProgress(), 0.02
    for line in sys.stdin:
        order = json.loads(line)
        shared.reset()
        victim = os.fork()
        if victim == 0:
            _live(ROLES[role], url, order, shared)
        killer = PendingKill(victim, order["kill"], shared, opening_s)
        status = killer.status()
        opening_s = killer.opening_s or opening_s
        report("dead", status, shared.phase)


def _live(
    role: Callable[[str, Json, SharedProgress], None], url: str, order: Json, shared: SharedProgress
) -> None:
    try:
        role(url, order, shared)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class PendingKill:
    """Waits for a victim's moment; `moment` None: nobody kills it."""

    def __init__(
        self, victim: int, moment: KillMoment | None, shared: SharedProgress, opening_s: float
    ) -> None:
        self.victim = victim
        self.moment = moment
        self.shared = shared
        self.began = time.monotonic()
        self.opening_s = 0.0  # what this one took to its first acknowledgement
        self._transactions = 0  # that it had begun by then
        self._deadline: float | None = None
        if moment is not None and moment.get("from_start"):
            self._deadline = self.began + moment["wait"] * opening_s

    def status(self) -> int:
        """Its exit status; -9 after a kill. It may have ended by itself."""
        while True:
            ended, status = os.waitpid(self.victim, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            now = time.monotonic()
            if self._deadline is None:
                self._deadline = self._found(now)
            if self._deadline is None or now < self._deadline:
                time.sleep(0.0005)
            elif self._aimed() or now > self._deadline + 1:
                os.kill(self.victim, signal.SIGKILL)
                return os.waitstatus_to_exitcode(os.waitpid(self.victim, 0)[1])
            else:
                time.sleep(0.0001)  # commits are short

    def _aimed(self) -> bool:
        assert self.moment is not None
        return self.moment.get("aim") in (None, self.shared.phase)

    def _found(self, now: float) -> float | None:
        """When to kill it, once that is known."""
        if self.moment is None or not self.shared.reported:
            return None
        if not self.opening_s:
            self.opening_s = now - self.began
            self._transactions = self.shared.transactions
        since = self.shared.transactions - self._transactions
        if since < self.moment.get("transactions", 0):
            return None
        if since == 0:
            return now + self.moment.get("wait_s", 0.0)
        return now + self.moment["wait"] * (now - self.began - self.opening_s) / since


if __name__ == "__main__":
    main()
