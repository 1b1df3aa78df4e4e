"""What a step was made of: its groups, their rollouts with the rewards that training used, and what
became of each turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, select

from tracegrad.inspect.display_text import format_number
from tracegrad.inspect.reasons import untrained_text
from tracegrad.store import StepRecord
from tracegrad.store.errors import StoreCorrupt
from tracegrad.store.models import Rollouts
from tracegrad.store.read.step_turns import BEFORE_FIRST, StepTurn, TurnKey, turns_of_step
from tracegrad.store.read.task_titles import load_inputs, title_of_task
from tracegrad.store.rows import rows_of_keys
from tracegrad.ui.pages.rollouts import path_of as path_of_rollout
from tracegrad.ui.paging import WrongLink, link, read_number

# A page has so many rollouts of the batch, and so many turns of each; one alone has more.
ROLLOUTS = 20
TURNS = 20
TURNS_ALONE = 200


class Place(NamedTuple):
    """Where a page of the batch begins: at this rollout of it, or, of `rollout` alone, behind this
    turn."""

    first: int = 0
    rollout: str | None = None
    after: TurnKey = BEFORE_FIRST


def read_place(given: Mapping[str, str]) -> Place:
    """WrongLink: names what cannot be read."""
    first, rollout = read_number("from", given.get("from", "0")), given.get("rollout") or None
    after = _read_key(given.get("after"))
    if rollout is None and after != BEFORE_FIRST:
        raise WrongLink("after: it is of one rollout; name that too")
    return Place(first, rollout, after)


def _read_key(text: str | None) -> TurnKey:
    if not text:
        return BEFORE_FIRST
    seq, _, number = text.partition("~")
    if not all(part.isdecimal() and len(part) <= 18 for part in (seq, number)):
        raise WrongLink("after: a page's link is incomplete: begin with the step")
    return TurnKey(int(seq), int(number))


@dataclass(frozen=True, slots=True)
class BatchRollout:
    """As the batch saw it: its first `turns` turns, and the rewards that training used."""

    group: str
    rollout_id: str
    reward: float
    turns: int
    turn_rewards: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class BatchTurn:
    """`kind`: trained, skipped, or undecided."""

    number: int
    href: str
    sampled_tokens: int
    kind: str
    said: str
    meaning: str
    reward: str | None
    advantage: str | None


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """`is_there`: False, if it was removed. `more`: where its other turns are."""

    seen: BatchRollout
    begins_group: bool
    href: str
    title: str | None
    is_there: bool
    turns: list[BatchTurn]
    more: str | None


def read_batch(record: StepRecord) -> list[BatchRollout] | None:
    """Its rollouts, those of a group together; None: the step does not say. StoreCorrupt: it is no
    batch."""
    if record.batch is None:
        return None
    try:
        return [
            BatchRollout(
                group=str(group["group_id"]),
                rollout_id=str(one["rollout_id"]),
                reward=float(one["reward"]),
                turns=int(one["turns"]),
                turn_rewards={str(n): float(reward) for n, reward in one["turn_rewards"].items()},
            )
            for group in record.batch["groups"]
            for one in group["rollouts"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StoreCorrupt(f"step {record.step}: its batch cannot be read ({error!r})") from None


def batch_values(
    connection: Connection, step: int, path: str, batch: list[BatchRollout], place: Place
) -> dict[str, Any]:
    """What the template needs: a page of rollouts, or one alone. WrongLink: there is no such."""
    if place.rollout is None:
        chosen, limit = batch[place.first : place.first + ROLLOUTS], TURNS
        if place.first and not chosen:
            raise WrongLink(f"from: the batch has {len(batch)} rollouts")
    else:
        chosen, limit = [one for one in batch if one.rollout_id == place.rollout], TURNS_ALONE
        if not chosen:
            raise WrongLink(f"rollout: step {step} was not made of {place.rollout[:80]!r}")
    later = place.first + ROLLOUTS
    has_later = place.rollout is None and later < len(batch)
    shown = _shown(connection, step, path, chosen, place.after, limit)
    return {
        "rollouts": shown,
        "has_advantages": any(turn.advantage for one in shown for turn in one.turns),
        "has_rewards": any(turn.reward for one in shown for turn in one.turns),
        "place": place,
        "total": len(batch),
        "groups": len({one.group for one in batch}),
        "later": link(path, [], **{"from": str(later)}) if has_later else None,
    }


def _shown(
    connection: Connection,
    step: int,
    path: str,
    chosen: list[BatchRollout],
    after: TurnKey,
    limit: int,
) -> list[ShownRollout]:
    titles = _titles(connection, [one.rollout_id for one in chosen])
    found, group = [], None
    for one in chosen:
        turns = turns_of_step(connection, one.rollout_id, after, limit=limit + 1)
        has_more = len(turns) > limit
        turns = turns[:limit]
        key = f"{turns[-1].key.seq}~{turns[-1].key.number}" if has_more else None
        found.append(
            ShownRollout(
                seen=one,
                begins_group=one.group != group,
                href=path_of_rollout(one.rollout_id),
                title=titles.get(one.rollout_id),
                is_there=one.rollout_id in titles,
                turns=[_turn(step, one, turn) for turn in turns],
                more=link(path, [], rollout=one.rollout_id, after=key) if key else None,
            )
        )
        group = one.group
    return found


def _titles(connection: Connection, rollout_ids: list[str]) -> dict[str, str | None]:
    """Of the rollouts that are there."""
    query = select(Rollouts.rollout_id, Rollouts.task_id)
    tasks = dict(
        row._tuple() for row in rows_of_keys(connection, query, Rollouts.rollout_id, rollout_ids)
    )
    asked = load_inputs(connection, rollout_ids)
    return {name: title_of_task(task, asked.get(name)) for name, task in tasks.items()}


def _turn(step: int, seen: BatchRollout, turn: StepTurn) -> BatchTurn:
    number = turn.key.number
    reward = seen.turn_rewards.get(str(number))
    kind, said, meaning = _disposition(step, turn)
    return BatchTurn(
        number=number,
        href=f"{path_of_rollout(seen.rollout_id)}?turn={number}#turn-{number}",
        sampled_tokens=turn.sampled_tokens,
        kind=kind,
        said=said,
        meaning=meaning,
        reward=None if reward is None else format_number(reward),
        advantage=None if turn.advantage is None else f"{turn.advantage:+.3f}",
    )


def _disposition(step: int, turn: StepTurn) -> tuple[str, str, str]:
    """Its kind, in a word, and what that word means."""
    if turn.step is not None:
        return "trained", "trained" if turn.step == step else f"trained in step {turn.step}", ""
    if turn.skip_reason is None:
        return "undecided", "undecided", "nothing was decided about it"
    return "skipped", turn.skip_reason, untrained_text(turn.skip_reason).meaning
