"""Why a turn continues no earlier one, with the evidence: messages and tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from tracegrad.chat.messages import render_options
from tracegrad.events import Json, Turn
from tracegrad.inspect.transcript import Message, Transcript
from tracegrad.inspect.tree_layout import sample_key
from tracegrad.proxy.dialects.history import recorded_reply
from tracegrad.proxy.prompt_reuse.conversation_hash import reply_difference, same_but_for_ids
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason
from tracegrad.turn_tree import common_prefix, paths

_BEFORE, _AFTER = 4, 6  # tokens shown around the first that differs


@dataclass(frozen=True, slots=True)
class MessageDifference:
    """The first message that is another one; None where a side has no more messages."""

    position: int
    before: Message | None
    now: Message | None


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The ids around `position`, from `start` on. `in_reply`: so many tokens into what the
    earlier turn sampled; None where its prompt differs already."""

    position: int
    start: int
    before: list[int]
    now: list[int]
    in_reply: int | None


@dataclass(frozen=True, slots=True)
class FrameDifference:
    """Tools that were taken away, given and changed, and template arguments that changed."""

    gone: list[str]
    new: list[str]
    changed: list[str]
    arguments: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkFinding:
    """A turn that does not continue the one before it in its conversation.

    `instead_of`: the earlier turn that it would have continued, None where there is none.
    `like`: the earlier turn whose tokens its prompt shares most of, from the first on: `shared`
    of the `context` (prompt and reply) of that one. `again` of them its own parent lacks: they
    are stored a second time, and computed again where the engine's prefix cache lacks them.
    """

    turn: int
    reason: str | None
    parent: int | None
    instead_of: int | None
    like: int | None
    prompt: int
    shared: int
    context: int
    again: int
    texts: bool  # of both are stored
    ids_changed: bool  # of tool calls, in messages that are the same otherwise
    reply: Message | None  # to `instead_of`
    message: MessageDifference | None
    frame: FrameDifference | None
    tokens: TokenDifference | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTotals:
    """Tokens of a rollout.

    `sent`: of all prompts. `stored`: what of prompts and replies is kept, `again` of it for the
    second time. `trained_on`: of all paths, root to leaf, that rows are made of; a token that
    branches share is read once for each of them, a sampled one is trained in one.
    """

    turns: int
    roots: int
    paths: int
    sent: int
    sampled: int
    stored: int
    again: int
    trained_on: int


def find_forks(transcript: Transcript) -> list[ForkFinding]:
    """Of every turn that begins afresh although others came before it, or says why it forks."""
    found = []
    seen: set[tuple[str | None, bytes]] = set()  # prompts
    for index, turn in enumerate(transcript.turns):
        afresh = False
        if transcript.parent(index) is None:
            afresh = index > 0 and sample_key(turn) not in seen
            seen.add(sample_key(turn))
        if turn.fork_reason is not None or afresh:
            found.append(_fork(index, transcript))
    return found


def token_totals(transcript: Transcript, found: Sequence[ForkFinding]) -> TokenTotals:
    turns = transcript.turns
    every = list(paths(turns))
    return TokenTotals(
        turns=len(turns),
        roots=sum(transcript.parent(index) is None for index in range(len(turns))),
        paths=len(every),
        sent=sum(len(turn.prompt_token_ids) for turn in turns),
        sampled=sum(len(turn.completion_token_ids) for turn in turns),
        stored=sum(_length(turn) - transcript.parent_tokens(i) for i, turn in enumerate(turns)),
        again=sum(fork.again for fork in found),
        trained_on=sum(_length(path[-1]) for path in every),
    )


def expected_parent(index: int, transcript: Transcript) -> int | None:
    """The earlier turn that turn `index` would have continued by its messages, or by its tokens
    where no texts are stored."""
    turn = transcript.turns[index]
    if turn.fork_reason == ForkReason.NEW_CONVERSATION or index == 0:
        return None
    mine = transcript.all_messages(index)
    if not mine:
        return _longest_shared_prefix(index, transcript.turns)[0]
    if not any(message.get("role") == "assistant" for message in mine):
        return None
    return transcript.closest_turn(index)


def _fork(index: int, transcript: Transcript) -> ForkFinding:
    turns = transcript.turns
    turn = turns[index]
    like, shared = _longest_shared_prefix(index, turns)
    rival = expected_parent(index, transcript)
    compared = rival if rival is not None else like
    return ForkFinding(
        turn=index,
        reason=turn.fork_reason,
        parent=transcript.parent(index),
        instead_of=rival,
        like=like,
        prompt=len(turn.prompt_token_ids),
        shared=shared,
        context=_length(turns[like]) if like is not None else 0,
        again=max(0, shared - transcript.parent_tokens(index)),
        texts=rival is not None
        and bool(transcript.all_messages(index) and transcript.all_messages(rival)),
        ids_changed=rival is not None and _ids_changed(index, rival, transcript),
        reply=transcript.reply(rival) if rival is not None else None,
        message=_message_difference(index, rival, transcript) if rival is not None else None,
        frame=_frame_difference(index, rival, transcript) if rival is not None else None,
        tokens=_token_difference(turns[compared], turn) if compared is not None else None,
    )


def _length(turn: Turn) -> int:
    return len(turn.prompt_token_ids) + len(turn.completion_token_ids)


# Messages


def _message_difference(index: int, rival: int, transcript: Transcript) -> MessageDifference | None:
    mine, theirs = transcript.all_messages(index), _recorded(rival, transcript)
    for position, message in enumerate(theirs):
        now = mine[position] if position < len(mine) else None
        if now is None or not _same(now, message):
            other = transcript.message(now) if now is not None else None
            return MessageDifference(position, transcript.message(message), other)
    return None


def _recorded(index: int, transcript: Transcript) -> list[Json]:
    """A turn's conversation and reply; replies as they were recorded, not as they came back."""
    messages = list(transcript.all_messages(index))
    at: int | None = index
    while at is not None:
        reply, position = recorded_reply(transcript.turns[at]), len(transcript.all_messages(at))
        if reply is not None and position <= len(messages):
            messages[position : position + 1] = [{**reply, "role": "assistant"}]
        at = transcript.parent(at)
    return messages


def _same(mine: Json, theirs: Json) -> bool:
    """As the proxy compares them: ids of tool calls may be others."""
    if mine == theirs or same_but_for_ids(mine, theirs):
        return True
    # A reply is recorded with fields that clients do not send back.
    return theirs.get("role") == "assistant" and reply_difference(theirs, mine) is None


def _ids_changed(index: int, rival: int, transcript: Transcript) -> bool:
    pairs = zip(transcript.all_messages(index), _recorded(rival, transcript), strict=False)
    shared = takewhile(lambda pair: _same(*pair), pairs)
    return any(_ids(mine) != _ids(theirs) for mine, theirs in shared)


def _ids(message: Json) -> list[str | None]:
    answered = message.get("tool_call_id")
    calls = message.get("tool_calls") or ()
    return [answered, *(call.get("id") for call in calls)]


def _frame_difference(index: int, rival: int, transcript: Transcript) -> FrameDifference | None:
    mine, theirs = transcript.call(index), transcript.call(rival)
    if mine is None or theirs is None:
        return None
    now, before = render_options(mine.body), render_options(theirs.body)
    tools, old = _by_name(now.tools), _by_name(before.tools)
    kwargs, old_kwargs = dict(now.kwargs or {}), dict(before.kwargs or {})
    found = FrameDifference(
        gone=sorted(old.keys() - tools.keys()),
        new=sorted(tools.keys() - old.keys()),
        changed=sorted(name for name in tools.keys() & old.keys() if tools[name] != old[name]),
        arguments=sorted(
            name
            for name in kwargs.keys() | old_kwargs.keys()
            if kwargs.get(name) != old_kwargs.get(name)
        ),
    )
    return found if found != FrameDifference([], [], [], []) else None


def _by_name(tools: Sequence[Json] | None) -> dict[str, Json]:
    return {str((tool.get("function") or {}).get("name")): tool for tool in tools or ()}


# Tokens


def _longest_shared_prefix(index: int, turns: Sequence[Turn]) -> tuple[int | None, int]:
    """The earlier turn whose context shares the longest beginning with this turn's prompt, the
    latest of equals, and how many tokens that is."""
    prompt = turns[index].prompt_token_ids
    best, most = None, 0
    # A turn that is continued is the beginning of the one that continues it.
    continued = {turn.parent_id for turn in turns[:index]}
    for earlier in range(index):
        turn = turns[earlier]
        if turn.turn_id in continued:
            continue
        shared = _common(prompt, turn)
        if shared and shared >= most:
            best, most = earlier, shared
    return best, most


def _common(prompt: array[int], turn: Turn) -> int:
    shared = common_prefix(prompt, turn.prompt_token_ids)
    if shared == len(turn.prompt_token_ids):
        shared += common_prefix(prompt[shared:], turn.completion_token_ids)
    return shared


def _token_difference(before: Turn, now: Turn) -> TokenDifference | None:
    if not (before.prompt_token_ids and now.prompt_token_ids):
        return None
    position = _common(now.prompt_token_ids, before)
    start, end = max(0, position - _BEFORE), position + _AFTER
    context = before.prompt_token_ids + before.completion_token_ids
    into = position - len(before.prompt_token_ids)
    return TokenDifference(
        position=position,
        start=start,
        before=context[start:end].tolist(),
        now=now.prompt_token_ids[start:end].tolist(),
        in_reply=into if into >= 0 else None,
    )
