"""Turns into rows: checked against their parents, reduced to what is new, packed.

Nothing here needs a transaction: what it relies on never changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from tracegrad.events import Turn
from tracegrad.sized_cache import SizedCache
from tracegrad.store.encoding.blobs import (
    BlobContent,
    ContextDigest,
    array_content,
    json_content,
    pack_blobs,
    routing_content,
)
from tracegrad.store.encoding.request_delta import BaseCandidate, RequestDelta, make_delta
from tracegrad.store.encoding.request_fingerprint import RequestFingerprint
from tracegrad.store.encoding.routed_experts import check_routing
from tracegrad.store.encoding.shared_texts import TextExtraction, TextSightings
from tracegrad.store.errors import EventRejected, ParentMissing
from tracegrad.store.models import Turns
from tracegrad.store.rows import column_values
from tracegrad.store.write.parent_cache import RECENT_TURNS, KnownParents, ParentInfo

ColumnValues = dict[str, Any]

_PACKED = ("delta", "completion", "logprobs", "request", "response", "routed_experts")

# Attempts at one task begin with the same prompt: it is packed once. Bytes of all and of one; a
# prompt of 8k tokens takes some 50 kB.
_MOST_PACKED, _LARGEST_PACKED, _SMALLEST_PACKED = 16 << 20, 2 << 20, 1024

# A turn without a parent is compared with the same few turns as the one before it.
_decoded_fingerprint = lru_cache(maxsize=1024)(RequestFingerprint.decode)


class PackedPrompt(NamedTuple):
    digest: ContextDigest  # to be copied
    blob: bytes


_packed_prompts: SizedCache[PackedPrompt] = SizedCache(
    _MOST_PACKED, smallest=_SMALLEST_PACKED, largest=_LARGEST_PACKED
)


@dataclass(slots=True)
class TurnRows:
    """Of `Turns`, of `SharedTexts` (blobs by digest), and of `TurnTexts`."""

    turns: list[ColumnValues] = field(default_factory=list)
    texts: dict[bytes, bytes] = field(default_factory=dict)
    links: list[ColumnValues] = field(default_factory=list)

    def turn_ids(self) -> list[str]:
        return [row["turn_id"] for row in self.turns]


def make_turn_rows(turns: Iterable[Turn], known: KnownParents) -> tuple[TurnRows, list[ParentInfo]]:
    """The rows, and what their children will need of them.

    Raises EventRejected for a turn that contradicts its parent.
    """
    rows = TurnRows()
    texts: dict[bytes, BlobContent] = {}
    made: dict[str, ParentInfo] = {}
    of_rollout: dict[str, list[ParentInfo]] = {}
    for turn in turns:
        parent = _parent_of(turn, known.turns, made)
        beside = of_rollout.setdefault(turn.rollout_id, [])
        earlier = [*beside, *([parent] if parent else known.recent.get(turn.rollout_id, ()))]
        row, lifting = _row(turn, parent, earlier[:RECENT_TURNS], known.sightings)
        context = ParentInfo(
            turn_id=turn.turn_id,
            rollout_id=turn.rollout_id,
            tokens=len(turn.prompt_token_ids) + len(turn.completion_token_ids),
            digest=row["context_digest"],
            fingerprint=row["request_marks"],
        )
        made[turn.turn_id] = context
        beside.insert(0, context)
        rows.turns.append(row)
        rows.links += lifting.links(turn.turn_id)
        texts |= lifting.texts
    _pack(rows.turns)
    missing = known.sightings.missing(texts)
    rows.texts = dict(zip(missing, pack_blobs([texts[digest] for digest in missing]), strict=True))
    return rows, list(made.values())


def _parent_of(
    turn: Turn, known: dict[str, ParentInfo], made: dict[str, ParentInfo]
) -> ParentInfo | None:
    if turn.parent_id is None:
        return None
    parent = known.get(turn.parent_id) or made.get(turn.parent_id)
    if parent is None:
        raise ParentMissing(
            f"parent_id: turn {turn.parent_id}, parent of {turn.turn_id}, is not stored; "
            "write parents first"
        )
    if parent.rollout_id != turn.rollout_id:
        raise EventRejected(
            f"parent_id: turn {turn.parent_id} belongs to rollout {parent.rollout_id}, "
            f"its child {turn.turn_id} to {turn.rollout_id}"
        )
    return parent


def _row(
    turn: Turn, parent: ParentInfo | None, earlier: Sequence[ParentInfo], repeats: TextSightings
) -> tuple[ColumnValues, TextExtraction]:
    known = parent.tokens if parent else 0
    prompt = turn.prompt_token_ids
    delta: bytes | BlobContent
    if parent is None:
        packed = _packed_prompt(prompt)
        digest, delta = packed.digest.copy(), packed.blob
    else:
        digest = ContextDigest().add(memoryview(prompt)[:known])
        if len(prompt) < known or digest.value() != parent.digest:
            raise EventRejected(
                f"parent_id: the prompt of turn {turn.turn_id} does not begin with the "
                f"prompt and completion of turn {turn.parent_id}"
            )
        digest.add(prompt[known:])
        delta = array_content(prompt[known:])
    digest.add(turn.completion_token_ids)
    versions = turn.policy_versions
    lifting = TextExtraction(turn.rollout_id, repeats)
    with _not_too_deep("request", turn):
        shared = _request_delta(turn, earlier)
        text = shared and lifting.request(shared.text, whole=shared.base is None)
        request = json_content(text) if shared else None
    with _not_too_deep("response", turn):
        response = None if turn.response is None else json_content(lifting.response(turn.response))
    row = {
        **column_values(turn, Turns),
        "prompt_tokens": len(prompt),
        "completion_tokens": len(turn.completion_token_ids),
        "context_digest": digest.value(),
        "delta": delta,
        "completion": array_content(turn.completion_token_ids),
        "logprobs": array_content(turn.completion_logprobs),
        "policy_versions": [list(span) for span in versions],
        "last_version": versions[-1][0] if versions else None,
        "request": request,
        "request_base": shared.base if shared else None,
        "request_marks": shared.fingerprint if shared else None,
        "response": response,
        "routed_experts": _routing_content(turn),
    }
    return row, lifting


def _packed_prompt(prompt: array[int]) -> PackedPrompt:
    key = prompt.tobytes()
    found = _packed_prompts.get(key)
    if found is None:
        [blob] = pack_blobs([array_content(prompt)])
        found = PackedPrompt(ContextDigest().add(prompt), blob)
        _packed_prompts.add(key, found, len(blob))
    return found


def _routing_content(turn: Turn) -> BlobContent | None:
    if turn.routed_experts is None:
        return None
    try:
        check_routing(
            turn.routed_experts, len(turn.prompt_token_ids) + len(turn.completion_token_ids)
        )
        return routing_content(turn.routed_experts)
    except ValueError as error:
        raise EventRejected(f"routed_experts: turn {turn.turn_id}: {error}") from error


@contextmanager
def _not_too_deep(field: str, turn: Turn) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise EventRejected(
            f"{field}: turn {turn.turn_id} has one that is nested too deeply for JSON"
        ) from None


def _request_delta(turn: Turn, earlier: Sequence[ParentInfo]) -> RequestDelta | None:
    if turn.request is None:
        return None
    candidates = [
        BaseCandidate(context.turn_id, _decoded_fingerprint(context.fingerprint))
        for context in earlier
        if context.fingerprint
    ]
    return make_delta(turn.request, turn.response, candidates)


def _pack(rows: Sequence[ColumnValues]) -> None:
    cells = [(row, name) for row in rows for name in _PACKED if isinstance(row[name], BlobContent)]
    blobs = pack_blobs([row[name] for row, name in cells])
    for (row, name), blob in zip(cells, blobs, strict=True):
        row[name] = blob
