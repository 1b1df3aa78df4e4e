"""The list of rollouts: filters as `tracegrad rollouts ls` has them, pages by key, what is new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from tracegrad.inspect.display_text import training_text
from tracegrad.inspect.filter_text import read_tags, read_time
from tracegrad.store import RolloutFilter, Store
from tracegrad.store.filters import OUTCOMES, STATES
from tracegrad.store.read.rollout_pages import (
    NewerCount,
    RolloutKey,
    RolloutPage,
    count_newer,
    ids_beginning_with,
    newest_key,
    next_rollout,
    page_of_rollouts,
    rollout_key,
)
from tracegrad.store.read.task_titles import title_of_task
from tracegrad.store.types import RolloutSummary
from tracegrad.ui.pages import tasks
from tracegrad.ui.paging import PAGE, Query, link, read_key, write_key
from tracegrad.ui.security import BASE

PATH = f"{BASE}/rollouts"
_NUMBERS: Mapping[str, type] = {
    "min_reward": float,
    "max_reward": float,
    "min_version": int,
    "max_version": int,
}
_MOST = 2**63 - 1  # what databases have room for
_FIELDS = ("task", "agent", "outcome", "state", "tag", "since", "until", *_NUMBERS)
# More new ones are not counted: "100+ new".
MOST_NEW = 100


def path_of(rollout_id: str) -> str:
    """Where a rollout is shown."""
    return f"{PATH}/{quote(rollout_id, safe='')}"


@dataclass(frozen=True, slots=True)
class ListQuery:
    """What a link to the list asks for. `texts`: the fields of the form, as they were written.
    `error`: what is wrong with one of them; then `wanted` asks for nothing."""

    texts: dict[str, str]
    wanted: RolloutFilter
    error: str | None = None
    pairs: Query = field(default_factory=list)  # of links that ask for the same


def read_query(pairs: Iterable[tuple[str, str]]) -> ListQuery:
    given = dict(pairs)
    texts = {name: text.strip() for name in _FIELDS if (text := given.get(name, "")).strip()}
    kept = list(texts.items())
    try:
        return ListQuery(texts, _filter(texts), None, kept)
    except ValueError as error:
        return ListQuery(texts, RolloutFilter(), str(error), kept)


def _filter(texts: Mapping[str, str]) -> RolloutFilter:
    values: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            if name == "tag":
                values["tags"] = read_tags(text.split())
            elif name in ("since", "until"):
                values[name] = read_time(text)
            else:
                values[name] = _number(name, text) if name in _NUMBERS else text
        except ValueError as error:
            reason = f"{text!r} is no number" if name in _NUMBERS else str(error)
            raise ValueError(f"{name}: {reason}") from None
    return RolloutFilter(**values)


def _number(name: str, text: str) -> float:
    number: float = _NUMBERS[name](text)
    if not -_MOST <= number <= _MOST:  # not a number is none of these
        raise ValueError
    return number


@dataclass(frozen=True, slots=True)
class ListedRollout:
    """A row of the table."""

    row: RolloutSummary
    title: str | None
    href: str
    task: str | None  # where its task is shown

    @property
    def outcome(self) -> str:
        return self.row.outcome.value if self.row.outcome is not None else "open"

    @property
    def training(self) -> str:
        return training_text(self.row)

    @property
    def training_class(self) -> str:
        return "good" if self.row.trained_turns else "plain"


def list_values(store: Store, query: ListQuery, before: str | None) -> dict[str, Any]:
    """What the template needs. WrongLink: `before` is no key."""
    key = read_key(before) if before else None
    with store.reading() as connection:
        page = page_of_rollouts(connection, query.wanted, before=key, limit=PAGE)
        newest = newest_key(connection)
    rows = [_listed(row, page, query) for row in page.rows]
    return {
        "query": query,
        "rows": rows,
        "outcomes": OUTCOMES,
        "states": STATES,
        "first_page": key is None,
        "older": _older(page, query),
        "newest": link(PATH, query.pairs),
        "searched_to": page.searched_to,
        "live": None if query.error else _live(query, newest),
        "columns": _columns(page.rows),
    }


def _columns(rows: Iterable[RolloutSummary]) -> dict[str, bool]:
    """What is the same in every row is left out."""
    some = list(rows)
    return {
        "agent": any(row.agent for row in some),
        "tags": any(row.tags for row in some),
    }


def _listed(row: RolloutSummary, page: RolloutPage, query: ListQuery) -> ListedRollout:
    return ListedRollout(
        row,
        title_of_task(row.task_id, page.asked.get(row.rollout_id)),
        link(path_of(row.rollout_id), query.pairs),
        tasks.path_of(row.task_id) if row.task_id is not None else None,
    )


def _older(page: RolloutPage, query: ListQuery) -> str | None:
    if not page.more:
        return None
    if page.searched_to is not None:
        key = RolloutKey(page.searched_to, "")
    else:
        key = RolloutKey(page.rows[-1].opened_at, page.rows[-1].rollout_id)
    return link(PATH, query.pairs, before=write_key(key))


def _live(query: ListQuery, newest: RolloutKey | None) -> str:
    after = write_key(newest) if newest is not None else None
    return link(f"{PATH}/events", query.pairs, after=after)


def count_new(store: Store, query: ListQuery, after: str | None) -> NewerCount:
    """Rollouts that came since the page was made, MOST_NEW at most. WrongLink: no key."""
    key = read_key(after) if after else None
    with store.reading() as connection:
        return count_newer(connection, query.wanted, key, most=MOST_NEW)


def neighbour_path(store: Store, rollout_id: str, query: ListQuery, *, newer: bool) -> str:
    """Where the rollout above or below one in the list is shown; the list where there is none, or
    where there was no time to find it: then it goes on from there."""
    with store.reading() as connection:
        key = rollout_key(connection, rollout_id)
        if key is None:
            return link(PATH, query.pairs)
        found = next_rollout(connection, query.wanted, key, newer=newer)
    if found.rollout_id is not None:
        return link(path_of(found.rollout_id), query.pairs)
    if found.searched_to is None:
        return link(PATH, query.pairs)
    return link(PATH, query.pairs, before=write_key(RolloutKey(found.searched_to, "")))


def search(store: Store, text: str) -> list[str]:
    """The ids that begin with a text, a page of them at most."""

    with store.reading() as connection:
        return ids_beginning_with(connection, text, limit=PAGE)
