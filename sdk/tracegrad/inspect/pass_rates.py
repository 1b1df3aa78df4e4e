"""How often attempts succeed: pass@k, the share of successes, and what a success costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tracegrad.pass_at_k import pass_at_k
from tracegrad.store.read.attempts import Attempt

NameT = TypeVar("NameT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class PassAtK:
    """The mean over tasks with k attempts or more; None: there is no such task."""

    k: int
    value: float | None
    tasks: int
    too_few: int  # tasks with fewer attempts


@dataclass(slots=True)
class PassRate:
    """Of attempts that have something in common. A rollout without a task is a task of its own.

    `unknown`: attempts that nobody rewarded; they are in no other figure.
    """

    attempts: int = 0
    successes: int = 0
    unknown: int = 0
    reward_sum: float = 0.0
    completion_tokens: int = 0  # of attempts that are known
    counts: defaultdict[str, list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0])
    )  # task -> attempts, successes

    def add(self, attempt: Attempt, success: float) -> None:
        if attempt.reward is None:
            self.unknown += 1
            return
        succeeded = attempt.reward >= success
        self.attempts += 1
        self.successes += succeeded
        self.reward_sum += attempt.reward
        self.completion_tokens += attempt.completion_tokens
        count = self.counts[attempt.task_id or f"rollout {attempt.rollout_id}"]
        count[0] += 1
        count[1] += succeeded

    @property
    def success(self) -> float | None:
        return self.successes / self.attempts if self.attempts else None

    @property
    def reward(self) -> float | None:
        return self.reward_sum / self.attempts if self.attempts else None

    @property
    def tokens_per_success(self) -> float | None:
        """Completion tokens of all attempts, also of those that failed."""
        return self.completion_tokens / self.successes if self.successes else None

    def at(self, k: int) -> PassAtK:
        enough = [(n, c) for n, c in self.counts.values() if n >= k]
        value = math.fsum(pass_at_k(n, c, k) for n, c in enough) / len(enough) if enough else None
        return PassAtK(k, value, len(enough), len(self.counts) - len(enough))


def pass_rates(
    attempts: Iterable[Attempt], by: Callable[[Attempt], NameT], *, success: float
) -> dict[NameT, PassRate]:
    """By what `by` says of an attempt. `success`: the least reward of one that succeeded."""
    found: dict[NameT, PassRate] = {}
    for attempt in attempts:
        found.setdefault(by(attempt), PassRate()).add(attempt, success)
    return found


def useful_ks(rates: Iterable[PassRate], wanted: Sequence[int] | None) -> list[int]:
    """Those that were asked for; or 1, 4 and 8, as far as some task has so many attempts."""
    if wanted is not None:
        return sorted(set(wanted))
    most = max((n for rate in rates for n, _ in rate.counts.values()), default=1)
    return [k for k in (1, 4, 8) if k <= most]
