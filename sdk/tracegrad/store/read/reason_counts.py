"""`tracegrad rollouts explain`: why turns were not trained and why trees forked, counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text
from sqlalchemy import Row, Select, Subquery, and_, case, func, literal, select

from tracegrad.cli.render.console import indented, rule
from tracegrad.cli.render.format import one_line, plural
from tracegrad.cli.render.rollout_list import short_id_width
from tracegrad.inspect.reasons import WAITING_TEXTS, ReasonText, fork_text, untrained_text
from tracegrad.store import RolloutFilter, Store
from tracegrad.store.expressions import training_state
from tracegrad.store.ledger.ledger import LATE
from tracegrad.store.models import Rollouts, TurnLedger, Turns

_MARGIN = 2


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """`example`: the newest rollout that has such turns. `final`: they will never be trained
    (of a fork: true)."""

    reason: str
    final: bool
    turns: int
    rollouts: int
    example: str


@dataclass(frozen=True, slots=True)
class ReasonCounts:
    """`turns == trained + sum of the turns of not_trained`."""

    rollouts: int
    turns: int
    trained: int
    not_trained: list[ReasonCount]  # the most frequent first, like `forks`
    forks: list[ReasonCount]


def count_reasons(store: Store, wanted: RolloutFilter) -> ReasonCounts:
    with store.reading() as connection:
        fates = connection.execute(_not_trained_query(wanted)).all()
        forks = connection.execute(_forks_query(wanted)).all()
        every = select(func.count()).select_from(Rollouts).where(wanted.where())
        rollouts = connection.scalar(every) or 0
    not_trained = [_counted(row) for row in fates if row.reason is not None]
    return ReasonCounts(
        rollouts=rollouts,
        turns=sum(row.turns for row in fates),
        trained=sum(row.turns for row in fates if row.reason is None),
        not_trained=_most_first(not_trained),
        forks=_most_first([_counted(row) for row in forks]),
    )


def _forks_query(wanted: RolloutFilter) -> Select[Any]:
    query = select(
        Turns.rollout_id, Turns.fork_reason.label("reason"), literal(1).label("final")
    ).where(Turns.fork_reason.is_not(None))
    if not wanted.matches_all:
        query = query.join(Rollouts, Rollouts.rollout_id == Turns.rollout_id).where(wanted.where())
    return _counting(query.subquery())


def _not_trained_query(wanted: RolloutFilter) -> Select[Any]:
    """As `reasons.untrained` has it for one turn; without a reason: it was trained."""
    # Once for each rollout: a turn only looks up how its rollout stands.
    stands = (
        select(Rollouts.rollout_id, training_state({}, time.time()).label("state"))
        .where(wanted.where())
        .cte("stands")
    )
    reason = case(
        (TurnLedger.turn_id.is_not(None), TurnLedger.skip_reason),
        (Turns.untrainable.is_not(None), Turns.untrainable),
        (stands.c.state == "consumed", LATE),
        else_=stands.c.state,
    )
    undecided = and_(TurnLedger.turn_id.is_(None), Turns.untrainable.is_(None))
    waits = and_(undecided, stands.c.state.in_(list(WAITING_TEXTS)))
    final = case((waits, 0), else_=1)
    return _counting(
        select(Turns.rollout_id, reason.label("reason"), final.label("final"))
        .join(stands, stands.c.rollout_id == Turns.rollout_id)
        .outerjoin(TurnLedger, TurnLedger.turn_id == Turns.turn_id)
        .subquery()
    )


def _counting(turns: Subquery) -> Select[Any]:
    return select(
        turns.c.reason,
        turns.c.final,
        func.count().label("turns"),
        func.count(turns.c.rollout_id.distinct()).label("rollouts"),
        func.max(turns.c.rollout_id).label("example"),
    ).group_by(turns.c.reason, turns.c.final)


def _counted(row: Row[Any]) -> ReasonCount:
    return ReasonCount(row.reason, bool(row.final), row.turns, row.rollouts, row.example)


def _most_first(found: list[ReasonCount]) -> list[ReasonCount]:
    return sorted(found, key=lambda each: (-each.turns, each.reason))


def render_reason_counts(found: ReasonCounts, width: int | None) -> Iterator[Text]:
    waiting = sum(each.turns for each in found.not_trained if not each.final)
    lost = found.turns - found.trained - waiting
    line = f"{plural(found.turns, 'turn')} in {plural(found.rollouts, 'rollout')}: "
    line += f"{found.trained:,} trained, {lost:,} not, {waiting:,} wait"
    yield from indented(Text(line), margin=0, width=width)
    shown = short_id_width([each.example for each in (*found.not_trained, *found.forks)])
    for title, rows in (
        ("why turns were not trained", [each for each in found.not_trained if each.final]),
        ("what the others wait for", [each for each in found.not_trained if not each.final]),
        ("why turns continue no earlier one", found.forks),
    ):
        if not rows:
            continue
        yield Text()
        yield rule(Text(title, style="bold"), width)
        for each in rows:
            words = fork_text(each.reason) if rows is found.forks else untrained_text(each.reason)
            yield from _tell(each, words, width, shown)


def _tell(each: ReasonCount, words: ReasonText, width: int | None, shown: int) -> Iterator[Text]:
    head = Text.assemble(
        (f"{each.turns:,}", "bold"), (f"  {one_line(each.reason)}", "yellow" if each.final else "")
    )
    example = f"  in {plural(each.rollouts, 'rollout')}, newest {one_line(each.example[:shown])}"
    head.append(example, style="dim")
    yield from indented(head, margin=_MARGIN, width=width)
    for text, style in ((words.meaning, ""), (words.fix and f"→ {words.fix}", "dim")):
        if text:
            yield from indented(Text(text, style=style), margin=_MARGIN + 3, width=width)


def reason_counts_json(found: ReasonCounts) -> dict[str, Any]:
    return {
        **asdict(found),
        "not_trained": [
            asdict(each) | untrained_text(each.reason)._asdict() for each in found.not_trained
        ],
        "forks": [
            {k: v for k, v in asdict(each).items() if k != "final"}
            | fork_text(each.reason)._asdict()
            for each in found.forks
        ],
    }
