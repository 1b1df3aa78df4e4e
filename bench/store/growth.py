"""What a store costs as it grows: every operation at several sizes, and what the database does."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, islice

from bench.store.places import Place
from bench.store.plans import Plan, plans
from bench.store.rollouts import SMALL, Rollout, rollout
from tracegrad.events import Event, Outcome, Reward, RolloutFinished
from tracegrad.store import Ledger, RolloutFilter, StepRecord, Store

# Ready for training at every size; all older ones were trained.
_WAITING = 512
_STEP = 256
_GROUP = 8
_AT_ONCE = 200  # rollouts in a transaction while it is filled
# Of so many rollouts one ends by a failure of its environment, one never.
_FAILS, _STAYS_OPEN = 50, 97
_OLD = 211  # of so many turns one is looked for again
_TOGETHER = 64


@dataclass(frozen=True, slots=True)
class Operation:
    """`flat`: it must cost the same however many turns are stored."""

    name: str
    flat: bool


@dataclass(frozen=True, slots=True)
class Growth:
    """`rounds`: by operation, for each round, the milliseconds at each of `sizes` (in turns)."""

    place: str
    sizes: tuple[int, ...]
    bytes: tuple[int, ...]
    rounds: dict[Operation, list[tuple[float, ...]]]
    fill_turns_per_s: float
    plans: tuple[Plan, ...]

    def medians(self, operation: Operation) -> list[float]:
        """One a size."""
        return [statistics.median(some) for some in zip(*self.rounds[operation], strict=True)]

    def times(self, operation: Operation) -> float:
        """How much longer at the largest size than at `base`, in the same round; the median."""
        at = self.sizes.index(self.base)
        return statistics.median(each[-1] / each[at] for each in self.rounds[operation])

    @property
    def base(self) -> int:
        """The largest of the sizes that are a tenth of the last one or less. Smaller stores fit
        into whatever the database keeps in memory: they show nothing."""
        return max(size for size in self.sizes if 10 * size <= self.sizes[-1])


def growth(place: Place, sizes: Sequence[int], say: Callable[[str], None]) -> Growth:
    """A store of each size, measured in turns: what else the machine does hits all alike."""
    with ExitStack() as stack:
        fillings = []
        for turns in sizes:
            url = place.new_url()
            stack.callback(place.drop, url)
            filling = _Filling(stack.enter_context(Store.open(url)), url)
            filling.up_to(turns)
            place.settle(url)
            say(f"{place.name}: {turns:,} turns stored")
            fillings.append(filling)
        rounds: dict[Operation, list[tuple[float, ...]]] = {}
        of_sizes = [_operations(filling) for filling in fillings]
        for each in zip(*of_sizes, strict=True):
            operation, times, _ = each[0]
            works = [work for _, _, work in each]
            for work in works:
                work()
            rounds[operation] = [tuple(_timed(work) for work in works) for _ in range(times)]
        last = fillings[-1]
        return Growth(
            place.name,
            tuple(sizes),
            tuple(place.size(filling.url) for filling in fillings),
            rounds,
            last.turns / last.seconds,
            tuple(plans(last.store, {o.name: work for o, _, work in of_sizes[-1]})),
        )


class _Filling:
    """A store as months of training leave it."""

    def __init__(self, store: Store, url: str) -> None:
        self.store, self.ledger, self.url = store, Ledger(store), url
        self.turns, self.seconds = 0, 0.0
        self.old_turns: list[str] = []
        self.rollout_ids: list[str] = []
        self._numbers = count(1)
        self._waiting: deque[Rollout] = deque()
        self._steps = count(1)

    def up_to(self, turns: int) -> None:
        start = time.perf_counter()
        while self.turns < turns:
            self._append(min(_AT_ONCE, -(-(turns - self.turns) // SMALL.turns)))
            while len(self._waiting) >= _WAITING + _STEP:
                self.train(_STEP)
        self.seconds += time.perf_counter() - start

    def new(self) -> Rollout:
        """A task's rollouts come one after another."""
        number = next(self._numbers)
        return rollout(SMALL, number // _GROUP, texts=False)

    def train(self, rollouts: int) -> None:
        some = [self._waiting.popleft() for _ in range(min(rollouts, len(self._waiting)))]
        step = next(self._steps)
        self.ledger.commit_step(
            StepRecord(step=step, version=step),
            trained=[turn.turn_id for one in some for turn in one.turns],
            skipped={},
            rollouts=[one.opened.rollout_id for one in some],
        )

    def _append(self, rollouts: int) -> None:
        events: list[Event] = []
        for _ in range(rollouts):
            made = self.new()
            rollout_id = made.opened.rollout_id
            events += [made.opened, *made.turns]
            self.rollout_ids.append(rollout_id)
            for turn in made.turns:
                self.turns += 1
                if self.turns % _OLD == 0:
                    self.old_turns.append(turn.turn_id)
            number = len(self.rollout_ids)
            if number % _STAYS_OPEN == 0:
                continue
            if number % _FAILS == 0:
                events.append(RolloutFinished(rollout_id=rollout_id, outcome=Outcome.ENV_ERROR))
                continue
            events.append(Reward(rollout_id=rollout_id, value=number % 7 / 7))
            events.append(RolloutFinished(rollout_id=rollout_id))
            self._waiting.append(made)
        self.store.append(events)


def _operations(filling: _Filling) -> list[tuple[Operation, int, Callable[[], object]]]:
    """Each, how often it is timed, and how it is done once."""
    store, ledger = filling.store, filling.ledger
    one_by_one = (turn for _ in range(40) for turn in filling.new().turns)
    old = iter(filling.old_turns[:: max(1, len(filling.old_turns) // 200)] * 200)
    shown = iter(filling.rollout_ids[:: max(1, len(filling.rollout_ids) // 200)] * 200)
    middle = f"task {len(filling.rollout_ids) // 2 // _GROUP}"

    def lease() -> None:
        ledger.release(ledger.lease(groups=8, group_size=_GROUP, owner="bench", ttl_s=600))

    def together() -> None:
        some = [filling.new().turns for _ in range(_TOGETHER)]
        store.append([turns[0] for turns in some])

    def of_task() -> object:
        return store.rollouts(RolloutFilter(task=middle))

    def tagged() -> object:
        return store.rollouts(RolloutFilter(tags={"split": "train"}))

    return [
        (
            Operation("append a turn, committed", True),
            100,
            lambda: store.append([*islice(one_by_one, 1)]),
        ),
        (Operation(f"append {_TOGETHER} turns of as many rollouts", True), 20, together),
        (Operation("find a turn by its id", True), 100, lambda: store.find_turn(next(old))),
        (Operation("lease, load and give back 64 rollouts", True), 10, lease),
        (Operation("commit a step of 16 rollouts", True), 5, lambda: filling.train(16)),
        (Operation("`rollouts show`", True), 30, lambda: store.rollout(next(shown))),
        (Operation("`rollouts ls`", True), 20, store.rollouts),
        (Operation("`rollouts ls --task`", True), 20, of_task),
        (Operation("`rollouts ls --tag`", True), 20, tagged),
        (Operation("count turns by what became of them", False), 5, store.turn_counts),
        (Operation("the curve of rewards, a point a rollout", False), 3, store.reward_curve),
    ]


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3
