"""The turns seen last, by rollout and by what was said in them, up to a bound of memory.

A rollout that is not here is read from the store. Nothing is lost by forgetting one.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

from tracegrad.chat.call import CHAT_PATH, Call, RecordedTurn
from tracegrad.chat.messages import render_options
from tracegrad.events import REFUSED, Json, Turn, token_id_array
from tracegrad.proxy.dialects.history import recorded_call, recorded_reply
from tracegrad.proxy.prompt_reuse.conversation_hash import (
    ConversationValues,
    HashedConversation,
    hash_conversation,
)
from tracegrad.proxy.shared_log import SharedLog
from tracegrad.proxy.store_async import run_in_thread, within_store_timeout

# What Python needs around the tokens themselves.
_TURN_BYTES = 1700
_MARK_BYTES = 140
_TREE_BYTES = 500


_TurnIndex = defaultdict[bytes, list["CachedTurn"]]


class TurnReader(Protocol):
    """What `tracegrad.store.Store` does of it."""

    def rollout_turns(
        self, rollout_id: str, *, raw: bool = True, expert_routing: bool = True
    ) -> list[Turn]: ...
    def find_turn(self, turn_id: str, *, expert_routing: bool = True) -> Turn | None: ...
    def count_turns(self, rollout_id: str) -> int: ...
    def recent_inferred(self, most: int) -> list[str]: ...


class CachedTurn(NamedTuple):
    """A recorded turn without its texts but for the reply: those are large.

    `conversation` is with the reply; None where there was none, or no whole one. `refused` is what
    the engine refused to answer: nothing continues it, and what is shorter is a compaction of it.
    """

    rollout_id: str
    parent_id: str | None
    turn: RecordedTurn
    conversation: HashedConversation | None
    created_at: float
    has_text: bool = True  # whether its request is known
    refused: HashedConversation | None = None
    # Rollout and turn that it continues elsewhere: training had taken that rollout already.
    before: tuple[str, str] | None = None

    @property
    def prompt_token_ids(self) -> array[int]:
        return self.turn.prompt_ids

    @property
    def completion_token_ids(self) -> array[int]:
        return self.turn.completion_ids

    @property
    def length(self) -> int:
        return len(self.turn.prompt_ids) + len(self.turn.completion_ids)

    @property
    def size(self) -> int:
        said = self.conversation or self.refused
        marks = len(said) if said is not None else 0
        reply = sum(map(len, map(str, self.turn.reply.values())))
        return _TURN_BYTES + 4 * self.length + _MARK_BYTES * marks + reply


def hash_call(call: Call) -> HashedConversation | None:
    """The call's conversation; None for one without messages."""
    if call.path != CHAT_PATH:
        return None
    return hash_conversation(call.messages, render_options(call.body).key)


def cached_turn(turn: Turn, said: HashedConversation | None) -> CachedTurn:
    """`said`: the conversation that the turn answered."""
    reply = recorded_reply(turn)
    choices = (turn.response or {}).get("choices") or [{}]
    recorded = RecordedTurn(
        turn_id=turn.turn_id,
        prompt_ids=turn.prompt_token_ids,
        completion_ids=turn.completion_token_ids,
        reply=reply or {},
        reply_index=len(said) if said is not None else 0,
        finish_reason=turn.finish_reason,
        stop_reason=choices[0].get("stop_reason"),
    )
    whole = said is not None and reply is not None and turn.finish_reason is not None
    refused = said if turn.finish_reason == REFUSED else None
    if refused is not None:
        _ = refused.prefix_hashes  # in place of the messages themselves
    return CachedTurn(
        rollout_id=turn.rollout_id,
        parent_id=turn.parent_id,
        turn=recorded,
        conversation=said.with_reply(reply)
        if whole and said is not None and reply is not None
        else None,
        created_at=turn.created_at,
        has_text=turn.request is not None,
        refused=refused,
    )


@dataclass(slots=True)
class _Tree:
    """`whole`: nothing of the rollout is in the store alone."""

    turns: dict[str, CachedTurn] = field(default_factory=dict)
    whole: bool = False
    loading: asyncio.Task[None] | None = None


class TurnTreeCache:
    """To be used from one event loop. The store is read from another thread."""

    def __init__(
        self, store: TurnReader, *, limit_bytes: int, others: SharedLog | None = None
    ) -> None:
        """`others`: the other workers of the proxy, whose turns are kept here as its own are."""
        self._store = store
        self._limit = limit_bytes
        self._others = others
        self._trees: OrderedDict[str, _Tree] = OrderedDict()
        # Turns by the keys of their conversations: there may be several equal ones.
        self._by_id: _TurnIndex = defaultdict(list)
        self._by_text: _TurnIndex = defaultdict(list)
        self._by_prompt: _TurnIndex = defaultdict(list)
        self._continued: set[str] = set()
        # Turns whose prompts, rendered by the engine, are known to be what the template gives.
        self._as_sent: set[str] = set()
        self.size = 0
        if others is not None:
            others.subscribe("turn", self._received)
            others.subscribe("forget", self.forget)
            others.when_lost(self._clear)

    async def turns(self, rollout_id: str, *, refresh: bool = False) -> list[CachedTurn]:
        """All turns of a rollout, read from the store where they are not here.

        `refresh`: read in any case; another proxy may have written some. Raises what the store
        raises.
        """
        tree = self._trees.get(rollout_id) or self.create(rollout_id, whole=False)
        self._trees.move_to_end(rollout_id)
        tree.whole = tree.whole and not refresh
        if not tree.whole and tree.loading is None:
            tree.loading = asyncio.create_task(self._load(rollout_id, tree))
            # Whoever waits for it sees its error; when nobody does any more, nobody needs to.
            tree.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        if tree.loading is not None:
            # Others wait for the same reading: a call that is cancelled must not stop it.
            await within_store_timeout(asyncio.shield(tree.loading))
        return list(tree.turns.values())

    async def is_behind(self, rollout_id: str) -> bool:
        """Whether the store has turns of the rollout that are not here: another proxy's, or some
        that were forgotten. Raises what the store raises."""
        stored = await within_store_timeout(run_in_thread(self._store.count_turns, rollout_id))
        return stored > len(self.in_memory(rollout_id))

    async def read_inferred(self, most: int) -> None:
        """The conversations without a name that had a call last, as many as fit in half of the
        memory. Raises what the store raises."""
        named = await within_store_timeout(run_in_thread(self._store.recent_inferred, most))
        read: list[str] = []
        for rollout_id in named:
            if self.size > self._limit // 2:
                break
            await self.turns(rollout_id)
            read.append(rollout_id)
        for rollout_id in reversed(read):  # the newest stays longest
            if rollout_id in self._trees:
                self._trees.move_to_end(rollout_id)

    def in_memory(self, rollout_id: str) -> list[CachedTurn]:
        """The rollout's turns that are in memory."""
        tree = self._trees.get(rollout_id)
        return list(tree.turns.values()) if tree is not None else []

    def recent(self, most: int) -> list[CachedTurn]:
        """Turns of all rollouts, the latest first."""
        trees = reversed(self._trees.values())
        every: Iterator[CachedTurn] = (t for tree in trees for t in reversed(tree.turns.values()))
        return list(islice(every, most))

    def find(self, said: HashedConversation, rollout_id: str | None) -> CachedTurn | None:
        """The turn with the longest conversation that `said` begins with, by the ids of tool
        calls, or else by what was said."""
        by_id = self._longest(self._by_id, said, said.reply_keys(), rollout_id)
        if by_id is not None and by_id.conversation is not None:
            said.continues(by_id.conversation)
            if by_id.turn.reply_index == said.replies[-1]:
                return by_id
        by_text = self._longest(self._by_text, said, said.reply_text_keys(), rollout_id)
        if by_id is None or by_text is None:
            return by_id or by_text
        return max(by_id, by_text, key=lambda turn: turn.turn.reply_index)

    def answered_otherwise(
        self, said: HashedConversation, rollout_id: str | None
    ) -> list[CachedTurn]:
        """Turns of the rollout, or of all, that were asked what comes before the last reply in
        `said`: it may be theirs, edited. The latest that nothing continues yet first."""
        key = said.prompt_key_at(said.replies[-1])
        found = [
            turn
            for turn in self._by_prompt.get(key, ())
            if rollout_id is None or turn.rollout_id == rollout_id
        ]
        found.reverse()
        return sorted(found, key=lambda turn: turn.turn.turn_id in self._continued)

    def _longest(
        self,
        index: _TurnIndex,
        said: HashedConversation,
        keys: Iterable[tuple[int, bytes]],
        rollout_id: str | None,
    ) -> CachedTurn | None:
        """Of equal ones the latest that nothing continues yet: samples of one prompt that came
        out equal are distinguished by who continues them."""
        for _, key in keys:
            found = [
                each
                for each in index.get(key, ())
                if rollout_id is None or each.rollout_id == rollout_id
            ]
            if (turn := self._chosen(found, said)) is not None:
                return turn
        return None

    def _chosen(self, equal: list[CachedTurn], said: HashedConversation) -> CachedTurn | None:
        """Of several, one that `said` holds with all the replies before it, whose reasoning the
        keys leave out. None where it holds none, and they are of more than one rollout: which one
        it continues is not known."""
        equal.reverse()
        equal.sort(key=lambda turn: turn.turn.turn_id in self._continued)
        if len(equal) > 1:
            for turn in equal:
                if all(said.holds(each.turn) for each in self.path(turn)):
                    return turn
        alike = len({turn.rollout_id for turn in equal}) == 1
        return equal[0] if alike else None

    def path(self, turn: CachedTurn) -> list[CachedTurn]:
        """From its root, as far as it is here, to the turn. A conversation that went on in another
        rollout begins in the first."""
        path = [turn]
        while (parent := self._parent(path[-1])) is not None:
            path.append(parent)
        return path[::-1]

    def is_as_sent(self, turn: CachedTurn) -> bool:
        """Whether the engine was sent what the template gives for its prompt, as far as is known
        here."""
        return turn.turn.turn_id in self._as_sent

    def set_as_sent(self, turn: CachedTurn) -> None:
        if turn.rollout_id in self._trees:
            self._as_sent.add(turn.turn.turn_id)

    def _parent(self, turn: CachedTurn) -> CachedTurn | None:
        rollout_id, parent_id = turn.before or (turn.rollout_id, turn.parent_id)
        tree = self._trees.get(rollout_id)
        return None if tree is None or parent_id is None else tree.turns.get(parent_id)

    def add(self, turn: CachedTurn) -> None:
        """A turn that the store has committed."""
        self._add(turn)
        if self._others is not None and not self._others.publish("turn", *_packed(turn)):
            # Too large to be told: the others read the rollout's turns from the store.
            self._others.publish("forget", turn.rollout_id)

    def _received(self, *packed: Any) -> None:
        self._add(_unpacked(*packed))

    def _add(self, turn: CachedTurn) -> None:
        tree = self._trees.get(turn.rollout_id) or self.create(turn.rollout_id, whole=False)
        self._trees.move_to_end(turn.rollout_id)
        self._file(tree, turn)
        self._evict()

    def forget(self, rollout_id: str) -> None:
        """The store has not the turns of this rollout any more that are here."""
        if rollout_id in self._trees:
            self._forget(rollout_id)

    def _clear(self) -> None:
        for rollout_id in list(self._trees):
            self._forget(rollout_id)

    def create(self, rollout_id: str, *, whole: bool) -> _Tree:
        """`whole`: the store has nothing of this rollout yet."""
        tree = self._trees[rollout_id] = _Tree(whole=whole)
        self.size += _TREE_BYTES
        self._evict()
        return tree

    def _file(self, tree: _Tree, turn: CachedTurn) -> None:
        if turn.turn.turn_id in tree.turns:
            return
        tree.turns[turn.turn.turn_id] = turn
        self.size += turn.size
        if turn.conversation is not None:
            for index, key in self._places(turn.conversation):
                index[key].append(turn)
        if turn.parent_id is not None:
            self._continued.add(turn.parent_id)

    async def _load(self, rollout_id: str, tree: _Tree) -> None:
        try:
            stored = await run_in_thread(self._read, rollout_id)
        except BaseException:
            tree.loading = None
            raise
        tree.loading, tree.whole = None, True
        if self._trees.get(rollout_id) is tree:
            already, tree.turns = tree.turns, {}
            for turn in stored:
                if (known_already := already.pop(turn.turn.turn_id, None)) is not None:
                    tree.turns[turn.turn.turn_id] = known_already
                else:
                    self._file(tree, turn)
            tree.turns |= already  # committed while the store was being read
            self._evict()

    def _read(self, rollout_id: str) -> list[CachedTurn]:
        turns = self._store.rollout_turns(rollout_id, expert_routing=False)
        here = {turn.turn_id: turn for turn in turns}

        def find(turn_id: str) -> Turn | None:
            return here.get(turn_id) or self._store.find_turn(turn_id, expert_routing=False)

        calls = [(turn, recorded_call(turn, find)) for turn in turns]
        return [
            cached_turn(turn, hash_call(call) if call is not None else None) for turn, call in calls
        ]

    def _evict(self) -> None:
        while self.size > self._limit and len(self._trees) > 1:
            self._forget(next(iter(self._trees)))

    def _forget(self, rollout_id: str) -> None:
        tree = self._trees.pop(rollout_id)
        self.size -= _TREE_BYTES
        for turn in tree.turns.values():
            self.size -= turn.size
            self._continued.discard(turn.parent_id or "")
            self._as_sent.discard(turn.turn.turn_id)
            if turn.conversation is not None:
                for index, key in self._places(turn.conversation):
                    _take_out(index, key, turn)

    def _places(self, said: HashedConversation) -> list[tuple[_TurnIndex, bytes]]:
        return [
            (self._by_id, said.key),
            (self._by_text, said.text_key),
            (self._by_prompt, said.prompt_key),
        ]


def _take_out(index: _TurnIndex, key: bytes, turn: CachedTurn) -> None:
    others = [each for each in index[key] if each is not turn]
    if others:
        index[key] = others
    else:
        del index[key]


def _packed(turn: CachedTurn) -> tuple[Any, ...]:
    """Of plain values alone, for `SharedLog`."""
    of = turn.turn
    return (
        turn.rollout_id,
        turn.parent_id,
        (of.turn_id, of.prompt_ids.tobytes(), of.completion_ids.tobytes(), of.reply),
        (of.reply_index, of.finish_reason, of.stop_reason),
        None if turn.conversation is None else turn.conversation.as_values(),
        turn.created_at,
        turn.has_text,
        None if turn.refused is None else turn.refused.as_values(),
        turn.before,
    )


def _unpacked(
    rollout_id: str,
    parent_id: str | None,
    tokens: tuple[str, bytes, bytes, Json],
    end: tuple[int, str | None, str | int | None],
    said: ConversationValues | None,
    created_at: float,
    has_text: bool,
    refused: ConversationValues | None,
    before: tuple[str, str] | None,
) -> CachedTurn:
    turn_id, prompt, completion, reply = tokens
    recorded = RecordedTurn(turn_id, _ids(prompt), _ids(completion), reply, *end)
    conversations = [
        None if each is None else HashedConversation.of_values(each) for each in (said, refused)
    ]
    answered, unanswered = conversations
    return CachedTurn(
        rollout_id=rollout_id,
        parent_id=parent_id,
        turn=recorded,
        conversation=answered,
        created_at=created_at,
        has_text=has_text,
        refused=unanswered,
        before=None if before is None else (before[0], before[1]),
    )


def _ids(data: bytes) -> array[int]:
    ids = token_id_array()
    ids.frombytes(data)
    return ids


def longest_first(turns: Sequence[CachedTurn]) -> list[CachedTurn]:
    """The first that fits is then the parent; the rest are passed over by their length."""
    return sorted(turns, key=lambda turn: -turn.length)
