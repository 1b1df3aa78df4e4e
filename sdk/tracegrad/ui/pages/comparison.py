"""Attempts side by side, turn by turn, and the first turn in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sqlalchemy import Connection

from tracegrad.inspect.transcript import Message, RepeatedMessages, Transcript
from tracegrad.store.errors import UnknownRollout
from tracegrad.store.read.rollout_outline import RolloutOutline, rollout_outline, with_texts
from tracegrad.store.read.rollout_pages import rollout_key
from tracegrad.store.types import RolloutSummary
from tracegrad.ui.pages.messages import LeftOut, Room, ShownMessage, shown_message, shown_news
from tracegrad.ui.pages.rollouts import path_of
from tracegrad.ui.paging import WrongLink

MOST = 4  # attempts beside each other
WINDOW = 10  # turns of a page
# Characters of the texts of a page, shared by its turns and attempts.
CHARACTERS = 1_000_000
# Where they first differ is looked for in so many turns, from the first on.
_LOOKED_THROUGH = 100


@dataclass(frozen=True, slots=True)
class ComparedTurn:
    """What one attempt has in a turn. `tokens`: sampled."""

    news: list[ShownMessage | RepeatedMessages | LeftOut]
    reply: ShownMessage | None
    tokens: int
    has_text: bool
    href: str


@dataclass(frozen=True, slots=True)
class TurnRow:
    """A turn of all of them; None: the attempt has ended by then."""

    number: int
    sides: list[ComparedTurn | None]
    is_first_difference: bool


@dataclass(frozen=True, slots=True)
class AttemptComparison:
    """`differ`: the first turn in which they do; None: none of those that were looked through,
    which `looked_through` counts. `earlier`: the page before begins there."""

    attempts: list[RolloutSummary]
    hrefs: list[str]
    turns: list[TurnRow]
    first: int
    total: int
    earlier: int | None
    differ: int | None
    looked_through: int


@dataclass(frozen=True, slots=True)
class _Side:
    outline: RolloutOutline
    order: list[int]  # the numbers of its turns that are read
    transcript: Transcript

    def said(self, number: int) -> tuple[list[Message], Message | None] | None:
        """All that a turn was asked and answered; None: there is no such turn."""
        if number >= len(self.outline.detail.turns):
            return None
        at = self.order.index(number)
        return self.transcript.messages(at), self.transcript.reply(at)


def compare(
    connection: Connection,
    task_id: str,
    rollout_ids: Sequence[str],
    first: int,
    *,
    characters: int = CHARACTERS,
) -> AttemptComparison:
    """The turns from `first` on. WrongLink: too many, or one is no attempt at this task. Raises
    UnknownRollout."""
    ids = list(dict.fromkeys(rollout_ids))
    if len(ids) > MOST:
        raise WrongLink(f"compare: {len(ids)} attempts; {MOST} fit beside each other")
    outlines = [_outline(connection, task_id, rollout_id) for rollout_id in ids]
    total = max(len(each.detail.turns) for each in outlines)
    first = min(first - first % WINDOW, max(0, total - 1) // WINDOW * WINDOW)
    window = range(first, min(first + WINDOW, total))
    sides = [_side(connection, each, window) for each in outlines]
    looked_through = min(window.stop, _LOOKED_THROUGH)
    differ = _first_difference(sides, looked_through)
    room = characters // max(1, len(window) * len(sides))
    rows = [
        TurnRow(number, [_turn(side, number, room) for side in sides], number == differ)
        for number in window
    ]
    return AttemptComparison(
        attempts=[each.detail.summary for each in outlines],
        hrefs=[path_of(each.detail.summary.rollout_id) for each in outlines],
        turns=rows,
        first=first,
        total=total,
        earlier=first - WINDOW if first else None,
        differ=differ,
        looked_through=looked_through,
    )


def _outline(connection: Connection, task_id: str, rollout_id: str) -> RolloutOutline:
    # The whole id: the beginning of one may be that of several.
    if rollout_key(connection, rollout_id) is None:
        raise UnknownRollout(f"no rollout {rollout_id}")
    outline = rollout_outline(connection, rollout_id)
    if outline.detail.summary.task_id != task_id:
        raise WrongLink(f"compare: {rollout_id} is no attempt at this task")
    return outline


def _side(connection: Connection, outline: RolloutOutline, window: range) -> _Side:
    """With the texts of the window, and of the turns before as far as differences are looked for;
    else of those that say what is new in it."""
    turns = outline.detail.turns
    stop = min(window.stop, len(turns))
    wanted = {*range(min(stop, _LOOKED_THROUGH)), *range(window.start, stop)}
    places = {turn.turn_id: number for number, turn in enumerate(turns)}
    parents = {places.get(turns[number].parent_id or "") for number in range(window.start, stop)}
    texts = with_texts(connection, outline, wanted | {one for one in parents if one is not None})
    order = sorted(texts)
    return _Side(outline, order, Transcript([texts[number] for number in order]))


def _first_difference(sides: Sequence[_Side], turns: int) -> int | None:
    for number in range(turns):
        said = [side.said(number) for side in sides]
        if any(one != other for one, other in pairwise(said)):
            return number
    return None


def _turn(side: _Side, number: int, characters: int) -> ComparedTurn | None:
    if number >= len(side.outline.detail.turns):
        return None
    at = side.order.index(number)
    room = Room(characters)
    # The reply comes first, with half of the room: neither it nor what it answers goes without.
    half = Room(characters // 2)
    reply = side.transcript.reply(at)
    shown = shown_message(reply, half) if reply is not None else None
    room.used += half.used
    news = [
        RepeatedMessages(each.messages, side.order[each.of_turn])
        if isinstance(each, RepeatedMessages)
        else each
        for each in side.transcript.new_messages(at)
    ]
    rollout_id = side.outline.detail.summary.rollout_id
    return ComparedTurn(
        shown_news(news, room),
        shown,
        side.outline.sizes[number].sampled,
        side.transcript.turns[at].request is not None,
        f"{path_of(rollout_id)}?turn={number}#turn-{number}",
    )
