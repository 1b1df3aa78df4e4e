"""What the store must know of earlier turns to write later ones: in memory, of the latest.

A turn's context never changes once it is stored, whoever else writes to the store, with one
exception: `store.maintenance` removes turns, or changes their texts. Every such transaction leaves
a row in `removals`. So whoever writes a turn that refers to others looks, in
the same transaction, whether there is a newer row than the one that memory knows of; then memory
is given up. Parents that are not in memory are read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice

from sqlalchemy import Connection, bindparam, func, select

from tracegrad.events import Turn
from tracegrad.store.encoding.shared_texts import TextSightings
from tracegrad.store.models import Removals, Turns
from tracegrad.store.rows import chunks

# Turns in memory (about 600 bytes each), and how many of one rollout.
MAX_TURNS = 8_192
_MAX_TURNS_PER_ROLLOUT = 256
# A request is compared with those of so many earlier turns of its rollout.
RECENT_TURNS = 8

OpenReading = Callable[[], AbstractContextManager[Connection]]


@dataclass(frozen=True, slots=True)
class ParentInfo:
    """A child's prompt begins with so many tokens of this digest, in this rollout."""

    turn_id: str
    rollout_id: str
    tokens: int
    digest: bytes
    fingerprint: bytes | None  # of its request; None where no other can be stored as a delta to it


@dataclass(slots=True)
class KnownParents:
    """What some turns to be written may refer to."""

    turns: dict[str, ParentInfo] = field(default_factory=dict)  # by id
    # By rollout, the newest first: what a turn without a parent may be stored as a delta to.
    recent: dict[str, list[ParentInfo]] = field(default_factory=dict)
    sightings: TextSightings = field(default_factory=TextSightings)
    as_of: int = 0  # true while this is the last removal


class ParentCache:
    """Safe to use from many threads."""

    def __init__(self, most: int = MAX_TURNS) -> None:
        self._most = most
        self._lock = threading.Lock()
        # cachetools' LRUCache takes 6 us to remember a turn, this 1 us.
        self._rollouts: OrderedDict[str, dict[str, ParentInfo]] = OrderedDict()
        self.size = 0  # turns in memory
        self._as_of = 0
        self._sightings = TextSightings()

    def lookup(self, turns: Iterable[Turn], reading: OpenReading) -> KnownParents:
        known = KnownParents(sightings=self._sightings)
        missing = set()
        with self._lock:
            known.as_of = self._as_of
            for turn in turns:
                mine = self._rollouts.get(turn.rollout_id, {})
                if turn.parent_id is None:
                    known.recent[turn.rollout_id] = [*islice(reversed(mine.values()), RECENT_TURNS)]
                elif turn.parent_id in mine:
                    known.turns[turn.parent_id] = mine[turn.parent_id]
                else:
                    missing.add(turn.parent_id)
        if missing:
            with reading() as connection:
                known.turns |= load_parents(connection, missing)
        return known

    def rollouts_not_cached(self, rollout_ids: Iterable[str]) -> list[str]:
        """Those that may not be stored yet: no turn of theirs is in memory."""
        with self._lock:
            return [rollout_id for rollout_id in rollout_ids if rollout_id not in self._rollouts]

    def remember(
        self, contexts: Iterable[ParentInfo], texts: Iterable[bytes] = (), as_of: int = 0
    ) -> None:
        """Of turns, and shared texts, that are stored, and were so after this removal."""
        with self._lock:
            if as_of != self._as_of:
                return
            self._sightings.remember(texts)
            for context in contexts:
                mine = self._rollouts.setdefault(context.rollout_id, {})
                self._rollouts.move_to_end(context.rollout_id)
                self.size += context.turn_id not in mine
                mine[context.turn_id] = context
                if len(mine) > _MAX_TURNS_PER_ROLLOUT:
                    del mine[next(iter(mine))]
                    self.size -= 1
            self._evict()

    def keep(self, most: int) -> None:
        """So many turns from now on."""
        with self._lock:
            self._most = most
            self._evict()

    def _evict(self) -> None:
        while self.size > self._most and len(self._rollouts) > 1:
            _, forgotten = self._rollouts.popitem(last=False)
            self.size -= len(forgotten)

    def invalidate_before(self, as_of: int) -> None:
        """Give up what was known before this removal."""
        with self._lock:
            if as_of > self._as_of:
                self._as_of = as_of
                self._rollouts.clear()
                self._sightings.forget()
                self.size = 0

    def forget(self, rollout_ids: Iterable[str]) -> None:
        with self._lock:
            for rollout_id in rollout_ids:
                self.size -= len(self._rollouts.pop(rollout_id, ()))


def last_removal(connection: Connection) -> int:
    """Its number; 0 before the first."""
    return connection.scalar(_LAST_REMOVAL) or 0


# Built once: making a statement costs more than running it.
_BY_ID = select(
    Turns.turn_id,
    Turns.rollout_id,
    Turns.prompt_tokens + Turns.completion_tokens,
    Turns.context_digest,
    Turns.request_marks,
).where(Turns.turn_id.in_(bindparam("ids", expanding=True)))

_LAST_REMOVAL = select(func.max(Removals.seq))


def load_parents(connection: Connection, turn_ids: Iterable[str]) -> dict[str, ParentInfo]:
    """Those of the turns that are stored, by id."""
    found = {}
    for ids in chunks(sorted(turn_ids)):
        for row in connection.execute(_BY_ID, {"ids": ids}):
            found[row.turn_id] = ParentInfo(*row)
    return found
