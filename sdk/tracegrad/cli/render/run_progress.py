"""What `tracegrad run` prints while attempts are made: a line for each, a bar on a terminal, and a
summary."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tracegrad.events import Outcome
from tracegrad.inspect.display_text import one_line
from tracegrad.jsonutil import dump_json
from tracegrad.pass_at_k import SUCCESS, mean_pass_at_k
from tracegrad.runner.attempt import Attempt
from tracegrad.runner.driver import RunObserver
from tracegrad.runner.run_record import PastAttempt
from tracegrad.runner.scheduler import GroupKey, Ticket
from tracegrad.text_format import format_elapsed


@dataclass(slots=True)
class Tally:
    """Attempts that ended, and their rewards by group."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    rewards: defaultdict[GroupKey, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, group: GroupKey, outcome: Outcome, reward: float | None) -> None:
        self.outcomes[outcome] += 1
        if reward is not None:
            self.rewards[group].append(reward)

    @property
    def scored(self) -> int:
        return sum(count for outcome, count in self.outcomes.items() if outcome.scored)

    @property
    def known(self) -> list[float]:
        return [reward for rewards in self.rewards.values() for reward in rewards]

    def pass_at(self, k: int) -> float | None:
        """Over groups with k rewards or more; None: there is none."""
        return mean_pass_at_k(self.rewards.values(), k)


class RunProgress(RunObserver, AbstractContextManager["RunProgress"]):
    """`total`: attempts that are to be scored. `past`: of an earlier part of the run. `quiet`: only
    attempts that are not scored get a line, where a bar shows the others."""

    def __init__(
        self,
        total: int,
        *,
        attempts: int,
        as_json: bool,
        past: Sequence[PastAttempt] = (),
        bar: bool = False,
    ) -> None:
        self.attempts_made: list[Attempt] = []
        self.tally = Tally()
        self.total, self._attempts, self._as_json = total, attempts, as_json
        for one in past:
            self.tally.add(one.ticket.group, one.outcome, one.reward)
        self._before = self.tally.scored
        self._began = time.monotonic()
        console = Console(stderr=True)
        self._bar = _bar(console) if bar and console.is_terminal and not as_json else None
        self._of_bar = None if self._bar is None else self._bar.add_task("", total=total, note="")
        self._show()

    def __enter__(self) -> RunProgress:
        (self._bar or nullcontext()).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        (self._bar or nullcontext()).__exit__(*error)

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        self.attempts_made.append(attempt)
        self.tally.add(ticket.group, attempt.outcome, attempt.reward)
        if self._as_json:
            said = {"epoch": ticket.group.epoch, **asdict(attempt)}
            typer.echo(dump_json(said | {"logs": attempt.logs and str(attempt.logs)}))
        elif self._bar is None:
            typer.echo(self._line(attempt))
        elif not attempt.outcome.scored:
            self._bar.console.print(self._line(attempt), highlight=False, markup=False)
        self._show()

    def not_needed(self, attempts: int) -> None:
        """Of tasks that are left out by now."""
        self.total -= attempts
        if self._bar is not None and self._of_bar is not None:
            self._bar.update(self._of_bar, total=self.total)

    def say(self, line: str) -> None:
        """Of what is waited for."""
        if self._bar is None:
            typer.echo(f"tracegrad: {line}", err=True)
        else:
            self._bar.console.print(line, highlight=False, markup=False)

    def _line(self, attempt: Attempt) -> str:
        # Attempts of an earlier part count where they were scored: the others are made again.
        made = self._before + len(self.attempts_made)
        rate = "" if self.total == 1 else f"  {self.rate()}"
        return describe(attempt, f"{made}/{max(made, self.total)}", rate)

    def rate(self) -> str:
        """`12.4/min, 3 min left`"""
        minutes = (time.monotonic() - self._began) / 60
        done = self.tally.scored - self._before
        if not done or not minutes:
            return ""
        per_minute = done / minutes
        left = max(0, self.total - self.tally.scored)
        return f"{per_minute:.1f}/min, {format_elapsed(60 * left / per_minute)} left"

    def _show(self) -> None:
        if self._bar is not None and self._of_bar is not None:
            known = self.tally.known
            success = sum(reward >= SUCCESS for reward in known) / len(known) if known else None
            note = self.rate() + ("" if success is None else f"  success {success:.2f}")
            self._bar.update(self._of_bar, completed=self.tally.scored, note=note)

    def summary(self) -> str:
        """`8 rollouts: mean reward 0.5 of 8; pass@1 0.5, pass@4 0.75; 1 not the agent's doing`"""
        tally, known = self.tally, self.tally.known
        parts = [
            f"mean reward {sum(known) / len(known):.3g} of {len(known)}" if known else "no reward"
        ]
        ks = sorted({1, self._attempts}) if self._attempts > 1 or len(tally.rewards) > 1 else []
        passes = [(k, tally.pass_at(k)) for k in ks]
        if shown := ", ".join(f"pass@{k} {rate:.3g}" for k, rate in passes if rate is not None):
            parts.append(shown)
        made = sum(tally.outcomes.values())
        cut = tally.outcomes[Outcome.ABORTED]
        if cut:
            parts.append(f"{cut} aborted")
        if left := made - tally.scored - cut:
            parts.append(f"{left} not the agent's doing, and not scored")
        return f"{made} rollouts: {'; '.join(parts)}"


def _bar(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


def describe(attempt: Attempt, which: str, rate: str = "") -> str:
    """`3/8  completed  reward 1  5 calls  12.3 s  ROLLOUT`"""
    reward = "unknown" if attempt.reward is None else f"{attempt.reward:g}"
    calls = "calls unknown" if attempt.calls is None else f"{attempt.calls} calls"
    parts = [f"{attempt.outcome}", f"reward {reward}", calls]
    if "agent" in attempt.seconds:  # else it did not come to that, or was cut
        parts.append(f"{attempt.seconds['agent']:.1f} s")
    line = "  ".join([which, *parts, attempt.rollout_id]) + rate
    return line if attempt.reason is None else f"{line}\n     {one_line(attempt.reason)}"
