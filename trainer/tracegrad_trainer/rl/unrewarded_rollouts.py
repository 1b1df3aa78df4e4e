"""Finished rollouts that nobody rewards: training never leases them, and guards watch them all the
same, since an agent whose broken replies get no reward would else seem well."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from tracegrad.events import Json
from tracegrad.store import Store
from tracegrad.store.databases import statements
from tracegrad.store.read.unrewarded import UnrewardedRollout, finished_without_reward

ASK_EVERY_S = 1.0
MOST_AT_ONCE = 256  # their turns are read
# A reward may come late; ids of so many rollouts tell that one was looked at before it came.
MOST_REMEMBERED = 8_192
_MOST_TASKS = 8_192


class UnrewardedRollouts:
    """Those with these `tags` that ended since the trainer began, each once, when it has been
    without a reward for `after_s`."""

    def __init__(
        self,
        store: Store,
        tags: Mapping[str, str],
        after_s: float,
        *,
        composed: bool = False,
        held_out: Mapping[str, str] | None = None,
    ) -> None:
        self._store = store
        self._tags = tags
        self._after_s = after_s
        self._composed = composed
        self._held_out = held_out
        self.ask_every_s = ASK_EVERY_S
        self._asked = -ASK_EVERY_S
        self._last: tuple[float, str] | None = None  # end and id of the newest
        self._given: OrderedDict[str, None] = OrderedDict()
        self._tasks: OrderedDict[tuple[str, int], None] = OrderedDict()  # and versions

    def take(self) -> list[list[UnrewardedRollout]]:
        """Some of those that nobody was given, as groups: the attempts at a task, or one. Asks the
        store every `ask_every_s` at most. Raises StoreError."""
        if time.monotonic() - self._asked < self.ask_every_s:
            return []
        self._asked = time.monotonic()
        with self._store.reading() as connection:
            before = statements.server_time(connection) - self._after_s
            self._last = self._last or (before, "")
            found = finished_without_reward(
                connection,
                self._tags,
                after=self._last,
                before=before,
                limit=MOST_AT_ONCE,
                composed=self._composed,
                held_out=self._held_out,
            )
        # What was looked through without one is not looked through again: it may be much.
        last = found[-1] if len(found) == MOST_AT_ONCE else None
        self._last = (before, "") if last is None else (last.finished_at, last.rollout_id)
        groups: dict[str, list[UnrewardedRollout]] = {}
        for one in found:
            if one.rollout_id not in self._given:  # else it was opened again, and ended again
                self._given[one.rollout_id] = None
                groups.setdefault(one.task_id or f"\n{one.rollout_id}", []).append(one)
        while len(self._given) > MOST_REMEMBERED:
            self._given.popitem(last=False)
        return list(groups.values())

    def new_versions(self, task_id: str | None, versions: Iterable[int]) -> set[int]:
        """Of those whose attempts at a task were taken: the ones that were not asked for before.
        Attempts do alike, and of those that end one after the other only the first ones are
        news."""
        if task_id is None:
            return set(versions)
        found = {version for version in versions if (task_id, version) not in self._tasks}
        self._tasks.update(dict.fromkeys((task_id, version) for version in found))
        while len(self._tasks) > _MOST_TASKS:
            self._tasks.popitem(last=False)
        return found

    def was_given(self, rollout_id: str) -> bool:
        return rollout_id in self._given

    def state(self) -> Json:
        last = None if self._last is None else list(self._last)
        return {"last": last, "given": list(self._given)}

    def restore(self, state: Json) -> None:
        self._last = None if state["last"] is None else tuple(state["last"])
        self._given = OrderedDict.fromkeys(state["given"])
