"""Which recorded turn a prompt continues.

The tokens of turns seen last are kept in memory, by rollout and up to a bound; a rollout that is
not there is read from the store, while the engine is already at work on the call.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

import orjson

from tracegrad.records import Json, Turn, new_id
from tracegrad.turns import find_parent

# How many turns, the latest first, a call without a name is compared with.
RECENT_TURNS = 1000

# What Python needs around the tokens themselves.
_TURN_BYTES = 500
_TREE_BYTES = 500


class Place(NamedTuple):
    """Where in which turn tree a call belongs."""

    rollout_id: str
    parent_id: str | None
    fork_reason: str | None


class ReadsTurns(Protocol):
    """What `tracegrad.store.Store` does of it."""

    def rollout_turns(self, rollout_id: str, *, raw: bool = True) -> list[Turn]: ...
    def find_turn(self, turn_id: str) -> Turn | None: ...


class _Known(NamedTuple):
    """A recorded turn without its texts: these are large, and only a fork asks for them."""

    turn_id: str
    rollout_id: str
    prompt_token_ids: array[int]
    completion_token_ids: array[int]

    @property
    def length(self) -> int:
        return len(self.prompt_token_ids) + len(self.completion_token_ids)

    @property
    def size(self) -> int:
        return _TURN_BYTES + self.length * self.prompt_token_ids.itemsize


def _known(turn: Turn) -> _Known:
    return _Known(turn.turn_id, turn.rollout_id, turn.prompt_token_ids, turn.completion_token_ids)


@dataclass(slots=True)
class _Tree:
    turns: list[_Known] = field(default_factory=list)
    loading: asyncio.Task[None] | None = None


class Continuation:
    """To be used from one event loop. The store is read from another thread."""

    def __init__(self, store: ReadsTurns, *, limit_bytes: int) -> None:
        self._store = store
        self._limit = limit_bytes
        self._trees: OrderedDict[str, _Tree] = OrderedDict()
        self._size = 0

    def prefetch(self, rollout_id: str | None) -> None:
        """Start reading the rollout's turns, unless they are here."""
        if rollout_id is not None and rollout_id not in self._trees:
            tree = self._plant(rollout_id)
            tree.loading = asyncio.create_task(self._load(rollout_id, tree))
            # Whoever waits for it sees its error; when nobody does, nobody needs to.
            tree.loading.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def place(
        self, rollout_id: str | None, prompt: array[int], messages: Sequence[Json]
    ) -> Place:
        """Raises what the store raises."""
        if rollout_id is None:
            return self._place_untitled(prompt, messages)
        turns = await self._turns(rollout_id)
        if not prompt:
            return Place(rollout_id, None, None)
        parent = find_parent(prompt, _longest_first(turns))
        if parent is not None:
            return Place(rollout_id, parent.turn_id, None)
        return Place(rollout_id, None, await self._fork_reason(prompt, messages, turns))

    def add(self, turn: Turn) -> None:
        """A turn that the store has committed."""
        tree = self._trees.get(turn.rollout_id)
        if tree is None or not turn.prompt_token_ids:
            # Nothing in memory to extend (the store has it all), or nothing to compare with.
            return
        known = _known(turn)
        tree.turns.append(known)
        self._trees.move_to_end(turn.rollout_id)
        self._size += known.size
        self._evict()

    def _place_untitled(self, prompt: array[int], messages: Sequence[Json]) -> Place:
        # Without a reply among its messages a prompt cannot contain one.
        if prompt and any(message.get("role") == "assistant" for message in messages):
            recent = [turn for turn in self._recent() if turn.completion_token_ids]
            if (parent := find_parent(prompt, _longest_first(recent))) is not None:
                return Place(parent.rollout_id, parent.turn_id, None)
        rollout_id = new_id()
        self._plant(rollout_id)
        return Place(rollout_id, None, None)

    async def _fork_reason(
        self, prompt: array[int], messages: Sequence[Json], turns: Sequence[_Known]
    ) -> str | None:
        """Why a prompt that extends none of the rollout's turns does not.

        - `new_conversation`: it holds no reply, so it begins one (a retry, a sub-agent);
        - `template`: its messages continue a turn, but were rendered to other tokens;
        - `edited_history`: they continue no turn as it was.

        None for a rollout's first turn.
        """
        if not turns:
            return None
        if not any(message.get("role") == "assistant" for message in messages):
            return "new_conversation"
        closest = max(turns, key=lambda turn: (_shared(prompt, turn), turn.length))
        turn = await asyncio.to_thread(self._store.find_turn, closest.turn_id)
        return "template" if turn and _continues(messages, turn) else "edited_history"

    def _recent(self) -> Iterator[_Known]:
        trees = reversed(self._trees.values())
        return islice((turn for tree in trees for turn in reversed(tree.turns)), RECENT_TURNS)

    async def _turns(self, rollout_id: str) -> list[_Known]:
        self.prefetch(rollout_id)
        tree = self._trees[rollout_id]
        self._trees.move_to_end(rollout_id)
        if tree.loading is not None:
            # Others wait for the same reading: a call that is cancelled must not stop it.
            await asyncio.shield(tree.loading)
        return tree.turns

    async def _load(self, rollout_id: str, tree: _Tree) -> None:
        try:
            stored = await asyncio.to_thread(self._store.rollout_turns, rollout_id, raw=False)
        except BaseException:
            if self._trees.get(rollout_id) is tree:
                self._forget(rollout_id)
            raise
        added_meanwhile = {turn.turn_id for turn in tree.turns}
        loaded = [
            _known(turn)
            for turn in stored
            if turn.prompt_token_ids and turn.turn_id not in added_meanwhile
        ]
        tree.turns[:0] = loaded
        tree.loading = None
        if self._trees.get(rollout_id) is tree:
            self._size += sum(turn.size for turn in loaded)
            self._evict()

    def _plant(self, rollout_id: str) -> _Tree:
        tree = self._trees[rollout_id] = _Tree()
        self._size += _TREE_BYTES
        self._evict()
        return tree

    def _evict(self) -> None:
        while self._size > self._limit and len(self._trees) > 1:
            self._forget(next(iter(self._trees)))

    def _forget(self, rollout_id: str) -> None:
        tree = self._trees.pop(rollout_id)
        self._size -= _TREE_BYTES + sum(turn.size for turn in tree.turns)


def _longest_first(turns: Sequence[_Known]) -> list[_Known]:
    """The first that fits is then the parent; the rest are passed over by their length."""
    return sorted(turns, key=lambda turn: -turn.length)


def _shared(prompt: array[int], turn: _Known) -> int:
    """How many tokens the prompt has in common with the turn's prompt and completion."""
    context = turn.prompt_token_ids + turn.completion_token_ids
    low, high = 0, min(len(prompt), len(context))
    while low < high:
        middle = (low + high + 1) // 2
        if prompt[low:middle] == context[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _continues(messages: Sequence[Json], turn: Turn) -> bool:
    earlier = (turn.request or {}).get("messages") or []
    choices = (turn.response or {}).get("choices") or []
    if not earlier or not choices or len(messages) <= len(earlier):
        return False
    reply = choices[0].get("message") or {}
    return list(messages[: len(earlier)]) == earlier and _said(messages[len(earlier)]) == _said(
        reply
    )


def _said(message: Json) -> object:
    """What a reply says, however a client wrote it down again."""
    calls = []
    for tool in message.get("tool_calls") or ():
        function = tool.get("function") or {}
        arguments = function.get("arguments") or ""
        # As it stands where it is no JSON: a model writes what it writes.
        with suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(arguments)
        calls.append((function.get("name"), arguments))
    return message.get("role"), message.get("content") or "", calls
