"""A rollout without its tokens and texts, and these for some of its turns: one of thousands of
turns opens as one of three does.

`rollout_detail` gives each turn its whole prompt, which grows with the square of a conversation.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, select

from tracegrad.events import Json, Turn, logprob_array, token_id_array
from tracegrad.store.encoding.blobs import unpack_ids, unpack_logprobs
from tracegrad.store.encoding.request_restore import RestoredRequest, restore_content
from tracegrad.store.encoding.shared_texts import load_shared_texts
from tracegrad.store.errors import UnknownRollout
from tracegrad.store.models import Turns
from tracegrad.store.read.rollouts import rollout_without_turns
from tracegrad.store.rows import rows_of_keys
from tracegrad.store.types import RolloutDetail


class TurnSize(NamedTuple):
    """Tokens of a turn. `versions`: how many of the sampled ones are by which policy version."""

    prompt: int
    sampled: int
    versions: tuple[tuple[int, int], ...]
    request_base: str | None


@dataclass(frozen=True, slots=True)
class RolloutOutline:
    """`detail` has turns without tokens and texts; `sizes` belong to them, one each."""

    detail: RolloutDetail
    sizes: list[TurnSize]

    def number_of(self, turn_id: str) -> int | None:
        """Its place among the turns."""
        return next(
            (n for n, turn in enumerate(self.detail.turns) if turn.turn_id == turn_id), None
        )


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """`new_prompt`: what the prompt has beyond the turn's parent."""

    new_prompt: array[int]
    sampled: array[int]
    logprobs: array[float]


# What a turn's row says without its blobs.
_PLAIN = (
    *("turn_id", "rollout_id", "parent_id", "fork_reason", "dialect", "model", "finish_reason"),
    *("untrainable", "parent_span_id", "agent_name", "asked_model", "timing", "created_at"),
)
_SIZES = ("prompt_tokens", "completion_tokens", "policy_versions", "request_base", "sampling")
_OUTLINE = [getattr(Turns, name) for name in (*_PLAIN, *_SIZES)]
_TEXTS = (Turns.turn_id, Turns.request, Turns.response, Turns.request_base, Turns.request_marks)


def rollout_outline(connection: Connection, prefix: str) -> RolloutOutline:
    """By id or a prefix of it. Raises `UnknownRollout` or `AmbiguousRollout`."""
    detail = rollout_without_turns(connection, prefix)
    query = (
        select(*_OUTLINE).where(Turns.rollout_id == detail.summary.rollout_id).order_by(Turns.seq)
    )
    sizes = []
    for row in connection.execute(query):
        detail.turns.append(_outlined(row))
        versions = tuple((version, count) for version, count in row.policy_versions)
        sizes.append(TurnSize(row.prompt_tokens, row.completion_tokens, versions, row.request_base))
    return RolloutOutline(detail, sizes)


def _outlined(row: Row[Any]) -> Turn:
    return Turn(
        **{name: getattr(row, name) for name in _PLAIN},
        prompt_token_ids=token_id_array(),
        completion_token_ids=token_id_array(),
        completion_logprobs=logprob_array(),
        policy_versions=(),
        sampling=row.sampling,
    )


def with_texts(
    connection: Connection, outline: RolloutOutline, wanted: Collection[int]
) -> dict[int, Turn]:
    """Of these turns, by number: with requests and responses, where they are stored. Requests of
    one conversation hold the same items in memory: do not change them."""
    turns, numbers = outline.detail.turns, {}
    for number, turn in enumerate(turns):
        numbers[turn.turn_id] = number
    needed = {numbers[turn_id] for turn_id in _with_bases(outline, wanted, numbers)}
    ids = [turns[number].turn_id for number in sorted(needed)]
    rows = rows_of_keys(connection, select(*_TEXTS), Turns.turn_id, ids)
    found: dict[str, Any] = {row.turn_id: row for row in rows}
    placed = load_shared_texts(connection, ids)
    earlier: dict[str, RestoredRequest] = {}
    texts: dict[int, Turn] = {}
    for turn_id in ids:
        if turn_id not in found:
            raise UnknownRollout(f"turn {turn_id} was removed meanwhile")
        content = restore_content(found[turn_id], placed, earlier)
        if (number := numbers[turn_id]) in wanted:
            texts[number] = _with_text(turns[number], content.request, content.response)
    return texts


def _with_text(turn: Turn, request: Json | None, response: Json | None) -> Turn:
    values = {name: getattr(turn, name) for name in Turn.__dataclass_fields__}
    return Turn(**values | {"request": request, "response": response})


def _with_bases(
    outline: RolloutOutline, wanted: Collection[int], numbers: Mapping[str, int]
) -> set[str]:
    """The ids of these turns and of all whose requests theirs are stored as deltas to."""
    found: set[str] = set()
    waiting = [outline.detail.turns[number].turn_id for number in wanted]
    while waiting:
        turn_id = waiting.pop()
        if turn_id in found or turn_id not in numbers:
            continue
        found.add(turn_id)
        if (base := outline.sizes[numbers[turn_id]].request_base) is not None:
            waiting.append(base)
    return found


def turn_tokens(connection: Connection, turn_id: str) -> TurnTokens | None:
    """Of one turn, its own; None: there is no such turn."""
    query = select(Turns.delta, Turns.completion, Turns.logprobs)
    row = connection.execute(query.where(Turns.turn_id == turn_id)).one_or_none()
    if row is None:
        return None
    return TurnTokens(
        unpack_ids(row.delta), unpack_ids(row.completion), unpack_logprobs(row.logprobs)
    )
