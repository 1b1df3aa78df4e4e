"""How many rollouts may be opened now: a pure function of what is wanted and of what there is.

Two bounds, each optional, with the meanings that AReaL gives them (arXiv 2505.24298, section 5.1):

    in_flight       most rollouts that are open, or wait to be trained, at once
    max_staleness   eta: of `accepted` rollouts in all, those that version i trains on may be

                        accepted <= (eta + version + 1) * batch

A version trains on `batch` of them, so that `version * batch` are gone by then. What is written
here is the same less those: at most `(eta + 1) * batch` may be open, waiting or in the step under
way. Groups without a signal cost no version, and neither do rollouts that nobody scored: counting
what is left, and not all that ever was, they need no correction.

What is opened now is then trained by weights at most eta updates newer, if rollouts are trained in
the order in which they were opened. One that many later ones overtake may lag further.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

# Between two asks of who waits: shorter ones only load the store, longer ones idle agents.
MIN_RETRY_S = 0.1
MAX_RETRY_S = 15.0
# Until a first step says how long one takes.
UNKNOWN_RETRY_S = 1.0

LimitName = Literal["in_flight", "max_staleness", "synchronous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimits:
    """`groups` of `group_size` rollouts are a step's batch, `attempts` are made for each group.

    `max_staleness` in updates; 0: the next batch is opened when this one is trained and served.
    None: it bounds nothing.
    """

    groups: int
    group_size: int
    attempts: int
    in_flight: int | None = None
    max_staleness: int | None = None
    synchronous: bool = False

    @property
    def batch(self) -> int:
        """Rollouts that are opened for one step."""
        return self.groups * self.attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeCounts:
    """Rollouts of the trainer's tags that no step has taken for good.

    open: opened and not ended, or promised to somebody who is to open them; `cut` of them, and
        `begun` of them, are left out of their groups already, and had a call or a place.
    waiting: ended, and neither leased nor trained.
    leased: in the batch that is gathered, or in the step under way.
    useless: groups of these that the batch is not made of, since their rewards do not differ, or
        nothing of them is selected.
    groups: that `open` and `waiting` ones are enough for.
    """

    open: int = 0
    cut: int = 0
    begun: int = 0
    waiting: int = 0
    leased: int = 0
    useless: int = 0
    groups: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """`rollouts` may be opened; None: any number. `limit`: which bound it is that leaves no more.
    `steps`: of the trainer, until there is room for the `wanted` ones."""

    rollouts: int | None
    limit: LimitName | None = None
    steps: int = 0


def intake_capacity(
    limits: IntakeLimits, counts: IntakeCounts, *, wanted: int = 1, of_begun: bool = False
) -> Capacity:
    """For `wanted` rollouts that are to be opened together.

    Where nothing is open any more and what there is makes fewer groups than the next batch needs,
    no bound holds back what is missing: no step would ever be made. `of_begun`: for a rollout that
    is open already and had no call: only those that began before it take its place.
    """
    taken_open = counts.begun if of_begun else counts.open
    rooms: list[tuple[int, LimitName]] = []
    if limits.in_flight is not None:
        rooms.append((limits.in_flight - taken_open - counts.waiting, "in_flight"))
    if limits.max_staleness is not None:
        # A leased group of `group_size` stands for all the attempts that were made for it.
        leased = math.ceil(counts.leased * limits.attempts / limits.group_size)
        ahead = max(0, taken_open - counts.cut) + counts.waiting + leased
        name: LimitName = "synchronous" if limits.synchronous else "max_staleness"
        rooms.append(((limits.max_staleness + 1) * limits.batch - ahead, name))
    if not rooms:
        return Capacity(None)
    room, limit = min(rooms, key=lambda each: each[0])
    # Below 0: what was opened without asking.
    if missing := _missing_groups(limits, counts) * limits.attempts:
        room = max(room, missing)
    short = max(0, wanted - room)
    return Capacity(max(0, room), limit, math.ceil(short / limits.batch))


def _missing_groups(limits: IntakeLimits, counts: IntakeCounts) -> int:
    """Of the next batch, or of the one that is gathered. What is open may make them yet."""
    if counts.open > counts.cut:
        return 0
    held = counts.leased // limits.group_size - counts.useless
    return max(0, limits.groups - held - counts.groups)


def fits(capacity: Capacity, wanted: int) -> bool:
    return capacity.rollouts is None or wanted <= capacity.rollouts


def retry_after_s(capacity: Capacity, *, step_s: float | None, since_step_s: float | None) -> float:
    """When to ask again, in seconds: when the step is expected that makes room.

    `step_s`: how long the last steps took, each; `since_step_s`: how long ago the last one ended.
    """
    if step_s is None or since_step_s is None:
        return UNKNOWN_RETRY_S
    left = max(1, capacity.steps) * step_s - since_step_s
    return min(MAX_RETRY_S, max(MIN_RETRY_S, left))
