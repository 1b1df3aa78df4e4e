"""Of every turn: tokens, log-probabilities, versions and texts, rebuilt and proven.

One rollout at a time is in memory. What is wrong is collected, so that one broken turn does not
hide the next; those that only follow a broken one are counted.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, select

from tracegrad.store.encoding.blobs import (
    ContextDigest,
    json_content,
    unpack_ids,
    unpack_json,
    unpack_logprobs,
    unpack_routing,
)
from tracegrad.store.encoding.request_restore import RestoredRequest, restore_request
from tracegrad.store.encoding.routed_experts import check_routing
from tracegrad.store.encoding.shared_texts import (
    SharedTextsByTurn,
    is_unused,
    load_shared_texts,
    text_digest,
    unpack_turn_content,
)
from tracegrad.store.errors import StoreCorrupt
from tracegrad.store.maintenance.findings import Finding
from tracegrad.store.models import SharedTexts, Turns
from tracegrad.store.rows import count_rows

_TOKENS = (
    "restore the last good copy; without one let the rollout go: "
    "tracegrad prune --rollout {rollout} --also-untrained"
)
_TEXT = (
    "its tokens are whole and can be trained; restore the last good copy, or drop the rollout's "
    "text: tracegrad prune --text-only --rollout {rollout}"
)


@dataclass(slots=True)
class _Seen:
    """Of the turns of one rollout that were looked at already."""

    lengths: dict[str, int] = field(default_factory=dict)  # of whole contexts
    digests: dict[str, ContextDigest] = field(default_factory=dict)
    requests: dict[str, RestoredRequest] = field(default_factory=dict)
    broken_tokens: set[str] = field(default_factory=set)
    broken_texts: set[str] = field(default_factory=set)


MakeFinding = Callable[..., Finding]


def turn_checks(connection: Connection, rollout_ids: Iterable[str]) -> Iterator[Finding | int]:
    """Findings, and after each rollout the number of its turns."""
    columns = [column for column in Turns.__table__.columns if column.name != "sampling"]
    for rollout_id in rollout_ids:
        query = select(*columns).where(Turns.rollout_id == rollout_id).order_by(Turns.seq)
        seen, turns = _Seen(), 0
        rows = connection.execute(query).all()
        placed = load_shared_texts(connection, [row.turn_id for row in rows])
        for row in rows:
            turns += 1
            yield from _of_turn(row, seen, placed)
        yield turns


def _of_turn(row: Row[Any], seen: _Seen, placed: SharedTextsByTurn) -> Iterator[Finding]:
    def broken(check: str, message: str, fix: str = _TOKENS) -> Finding:
        return Finding(
            check=check,
            subject=f"turn {row.turn_id}",
            message=f"{message} (rollout {row.rollout_id})",
            fix=fix.format(rollout=row.rollout_id),
        )

    completion = yield from _tokens(row, seen, broken)
    yield from _sampled(row, completion, broken)
    yield from _routed(row, broken)
    yield from _texts(row, seen, placed, broken)


def _tokens(
    row: Row[Any], seen: _Seen, broken: MakeFinding
) -> Generator[Finding, None, array[int] | None]:
    """Returns the sampled ones; None where they cannot be read."""
    completion: array[int] | None = None
    try:
        delta, completion = unpack_ids(row.delta), unpack_ids(row.completion)
        if len(completion) != row.completion_tokens:
            found = f"{len(completion)} sampled tokens"
            yield broken("lengths", f"{found}, and {row.completion_tokens} are recorded")
        if row.parent_id in seen.broken_tokens:
            raise StoreCorrupt(f"it continues turn {row.parent_id}, whose tokens are broken")
        if row.parent_id is not None and row.parent_id not in seen.digests:
            raise StoreCorrupt(
                f"it continues turn {row.parent_id}, which its rollout does not have"
            )
        prompt = seen.lengths.get(row.parent_id, 0) + len(delta)
        if prompt != row.prompt_tokens:
            yield broken("lengths", f"{prompt} prompt tokens, and {row.prompt_tokens} are recorded")
        digest = seen.digests[row.parent_id].copy() if row.parent_id else ContextDigest()
        if digest.add(delta).add(completion).value() != row.context_digest:
            raise StoreCorrupt("its tokens are not the ones that were stored")
        seen.digests[row.turn_id] = digest
        seen.lengths[row.turn_id] = prompt + len(completion)
    except (StoreCorrupt, ValueError) as error:
        seen.broken_tokens.add(row.turn_id)
        yield broken("tokens", str(error))
    return completion


def _sampled(
    row: Row[Any], completion: array[int] | None, broken: MakeFinding
) -> Iterator[Finding]:
    """One log-probability and one version for each sampled token."""
    try:
        logprobs = unpack_logprobs(row.logprobs)
    except (StoreCorrupt, ValueError) as error:
        yield broken("lengths", f"its log-probabilities: {error}")
        return
    if completion is None:
        return
    if len(logprobs) != len(completion):
        yield broken(
            "lengths", f"{len(logprobs)} log-probabilities for {len(completion)} sampled tokens"
        )
    if not all(map(math.isfinite, logprobs)) and row.untrainable is None:
        yield broken("logprobs", "a log-probability is no finite number")
    covered = sum(count for _, count in row.policy_versions)
    if covered != len(completion):
        yield broken(
            "spans",
            f"its policy versions cover {covered} of {len(completion)} sampled tokens",
        )
    last = row.policy_versions[-1][0] if row.policy_versions else None
    if last != row.last_version:
        yield broken("spans", f"its last version is {last}, and {row.last_version} is recorded")


def _routed(row: Row[Any], broken: MakeFinding) -> Iterator[Finding]:
    """Experts of no more tokens than were read."""
    try:
        if (file := unpack_routing(row.routed_experts)) is not None:
            check_routing(file, row.prompt_tokens + row.completion_tokens)
    except (StoreCorrupt, ValueError) as error:
        yield broken("routes", f"its routed experts: {error}")


def _texts(
    row: Row[Any], seen: _Seen, placed: SharedTextsByTurn, broken: MakeFinding
) -> Iterator[Finding]:
    try:
        request, response = unpack_turn_content(row, placed)
        if row.request_marks is None:
            return
        if row.request_base in seen.broken_texts:
            raise StoreCorrupt(f"it is a delta to that of turn {row.request_base}, which is broken")
        base = seen.requests.get(row.request_base)
        if base is None and row.request_base is not None:
            raise StoreCorrupt(
                f"it is a delta to that of turn {row.request_base}, which is not here"
            )
        seen.requests[row.turn_id] = restore_request(request, response, row.request_marks, base)
    except StoreCorrupt as error:
        seen.broken_texts.add(row.turn_id)
        yield broken("texts", str(error), _TEXT)


def shared_text_checks(connection: Connection) -> Iterator[Finding]:
    """Of texts that several rollouts have: that each is the one it was, and is wanted."""
    for digest, blob in connection.execute(select(SharedTexts.digest, SharedTexts.blob)):
        try:
            whole = text_digest(json_content(unpack_json(blob)).pieces[0]) == digest
        except StoreCorrupt:
            whole = False
        if not whole:
            yield Finding(
                check="texts",
                subject=f"text {digest.hex()}",
                message="a text that several rollouts have is not the one that was stored",
                fix="their tokens are whole and can be trained; restore the last good copy, or "
                "drop the text of the rollouts that doctor names",
            )
    if count := count_rows(connection, SharedTexts, is_unused()):
        yield Finding(
            check="texts",
            message=f"{count:,} shared texts that no turn wants",
            fix="tracegrad doctor --fix takes them out",
            broken=False,
            count=count,
        )
