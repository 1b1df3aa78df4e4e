"""Groups of rollouts that nobody grouped: those that were asked something similar.

Words alone decide: two tasks are as similar as the words that they share among all that either has
(Jaccard's index), and only under the same system prompt. A group is what is similar to its first
rollout, so that each member can be explained by one comparison.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tracegrad.events import Json
from tracegrad.inspect.transcript import as_text
from tracegrad.jsonutil import dump_json

# Task ids that such groups are given begin with it.
SIMILAR = "similar:"
_SYSTEM = ("system", "developer")
# Scripts without spaces between words: each character counts as one.
_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+")


@dataclass(frozen=True, slots=True)
class TaskText:
    """What a rollout was asked first. `kind`: only rollouts of one are compared; `title`: for
    people."""

    rollout_id: str
    finished_at: float
    kind: str
    words: frozenset[str]
    title: str = field(default="", compare=False)


def task_text(
    rollout_id: str, finished_at: float, messages: Sequence[Json], *, kind: Sequence[str] = ()
) -> TaskText | None:
    """Of the messages of a first call; None: no user said anything in them. `kind`: what else
    keeps rollouts apart than their system prompt."""
    system = [as_text(each.get("content")) for each in messages if each.get("role") in _SYSTEM]
    asked = next((each for each in messages if each.get("role") == "user"), None)
    if asked is None:
        return None
    text = as_text(asked.get("content"))
    digest = hashlib.sha256(dump_json([*kind, system]).encode()).hexdigest()
    words = frozenset(_WORD.findall(text.casefold()))
    return TaskText(rollout_id, finished_at, digest, words, " ".join(text.split())[:200])


def similarity(one: frozenset[str], other: frozenset[str]) -> float:
    """From 0 to 1; texts without a word are like each other."""
    together = one | other
    return len(one & other) / len(together) if together else 1.0


def form_similar_groups(
    tasks: Iterable[TaskText], *, size: int, least: float
) -> list[list[TaskText]]:
    """All of them, at most `size` together, in the order in which they ended.

    Each joins the group whose first rollout it is the most similar to (of equals the oldest), as
    long as that has room and the similarity is at least `least`; else it begins one. So nothing
    that ends later changes the groups of those before.
    """
    open_groups: dict[str, list[list[TaskText]]] = {}
    groups: list[list[TaskText]] = []
    for task in sorted(tasks, key=lambda each: (each.finished_at, each.rollout_id)):
        candidates = open_groups.setdefault(task.kind, [])
        best, found = None, least
        for group in candidates:
            value = similarity(task.words, group[0].words)
            if value > found or (best is None and value >= found):
                best, found = group, value
        if best is None:
            best = []
            groups.append(best)
            candidates.append(best)
        best.append(task)
        if len(best) >= size:
            candidates.remove(best)
    return groups


def similar_task_id(rollout_ids: Iterable[str]) -> str:
    """Of the group that these make: another group has another."""
    return SIMILAR + hashlib.sha256(dump_json(sorted(rollout_ids)).encode()).hexdigest()[:16]


def is_ungrouped(task_id: str | None) -> bool:
    """Whether nobody but this module has grouped it."""
    return task_id is None or task_id.startswith(SIMILAR)


def left_alone(members: Mapping[str, str | None]) -> set[str]:
    """Of rollouts (and their task ids) that wait for training those whose similar ones have left:
    their scores can be compared with nothing any more."""
    count: dict[str, int] = {}
    for task_id in members.values():
        if task_id is not None and task_id.startswith(SIMILAR):
            count[task_id] = count.get(task_id, 0) + 1
    return {name for name, task_id in members.items() if count.get(task_id or "") == 1}
