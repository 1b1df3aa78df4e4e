"""Turns from rows: prompts rebuilt from the deltas, and proven against the stored digest.

All of a rollout takes time linear in its tokens, but for the one copy of its prompt that each
turn is given: hashes go on from the parent's, and turns that follow one another grow one array.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, Row, Select, bindparam, func, select
from sqlalchemy.orm import aliased

from tracegrad.events import UNACKNOWLEDGED, Json, Turn, token_id_array
from tracegrad.store.encoding.blobs import (
    ContextDigest,
    unpack_ids,
    unpack_logprobs,
    unpack_routing,
)
from tracegrad.store.encoding.request_restore import (
    RestoredRequest,
    require_earlier,
    restore_content,
)
from tracegrad.store.encoding.shared_texts import (
    SharedTextsByTurn,
    load_shared_texts,
)
from tracegrad.store.errors import StoreCorrupt
from tracegrad.store.models import Turns
from tracegrad.store.rows import chunks, common_names
from tracegrad.store.types import DEMONSTRATION, OLD_DEMONSTRATION

# Rows and blobs come from libraries that give up the interpreter's lock for microseconds each. Many
# threads that read would spend their time on passing it around: three quarters of it with 64.
_one_at_a_time = threading.Lock()

_EXPERT_ROUTING = (Turns.routed_experts,)
_RAW = (Turns.request, Turns.response, Turns.request_base, Turns.request_marks)
_ENCODED = {"policy_versions", "sampling", "request", "response", "routed_experts"}
# Fields of a turn that its row holds as they are.
_PLAIN = [name for name in common_names(Turn, Turns) if name not in _ENCODED]
_COLUMNS = (
    *(getattr(Turns, name) for name in _PLAIN),
    Turns.context_digest,
    Turns.delta,
    Turns.completion,
    Turns.logprobs,
    Turns.policy_versions,
    Turns.sampling,
)


@dataclass(frozen=True, slots=True)
class _TokenContext:
    """The tokens that a turn's children begin with: the first `length` of `ids`."""

    ids: array[int]
    length: int
    digest: ContextDigest

    def extended(
        self, delta: array[int], completion: array[int]
    ) -> tuple[array[int], _TokenContext]:
        """The prompt of a child, and its context.

        The first child's tokens are put behind these; other children start from a copy.
        """
        ids = self.ids if len(self.ids) == self.length else self.ids[: self.length]
        ids.extend(delta)
        prompt = ids[:]
        ids.extend(completion)
        digest = self.digest.copy().add(delta).add(completion)
        return prompt, _TokenContext(ids, len(ids), digest)


@dataclass(frozen=True, slots=True)
class _RestoredSoFar:
    """What is known of the turns of a rollout that were read already, by id."""

    contexts: dict[str, _TokenContext] = field(default_factory=dict)
    requests: dict[str, RestoredRequest] = field(default_factory=dict)


def load_turns(
    connection: Connection,
    rollout_ids: Sequence[str],
    *,
    raw: bool = True,
    expert_routing: bool = True,
) -> dict[str, list[Turn]]:
    """The turns of each rollout in order of capture; `raw` asks for requests and responses,
    `expert_routing` for `routed_experts`, of which a turn may have megabytes."""
    found: dict[str, list[Turn]] = {rollout_id: [] for rollout_id in rollout_ids}
    for ids in chunks(rollout_ids):
        rows = connection.execute(_OF_ROLLOUTS[raw, expert_routing], {"ids": ids}).all()
        placed = _shared_texts(connection, rows, raw)
        for rollout_id, of_rollout in groupby(rows, attrgetter("rollout_id")):
            found[rollout_id] = _restore_turns(of_rollout, placed, expert_routing=expert_routing)
    return found


def find_turn(
    connection: Connection, turn_id: str, *, raw: bool = True, expert_routing: bool = True
) -> Turn | None:
    """None: there is none. `raw` and `expert_routing` as for `load_turns`."""
    rows = connection.execute(_WITH_ANCESTORS[raw, expert_routing], {"id": turn_id}).all()
    turns = _restore_turns(
        rows, _shared_texts(connection, rows, raw), expert_routing=expert_routing
    )
    return turns[-1] if turns else None


def count_turns(connection: Connection, rollout_id: str) -> int:
    of_rollout = select(func.count()).where(Turns.rollout_id == rollout_id)
    return connection.execute(of_rollout).scalar_one()


def _shared_texts(
    connection: Connection, rows: Sequence[Row[Any]], raw: bool
) -> SharedTextsByTurn | None:
    """Texts that the turns share with other rollouts; None where none are asked for."""
    return load_shared_texts(connection, [row.turn_id for row in rows]) if raw else None


def _of_rollouts(raw: bool, expert_routing: bool) -> Select[Any]:
    wanted = Turns.rollout_id.in_(bindparam("ids", expanding=True))
    return _select(raw, expert_routing).where(wanted).order_by(Turns.rollout_id, Turns.seq)


def _with_ancestors(raw: bool, expert_routing: bool) -> Select[Any]:
    """A turn after all those that it is a delta to."""
    turn = select(Turns.turn_id, Turns.parent_id, Turns.request_base)
    chain = turn.where(Turns.turn_id == bindparam("id")).cte("chain", recursive=True)
    above = aliased(Turns)
    needed = [chain.c.parent_id, chain.c.request_base] if raw else [chain.c.parent_id]
    chain = chain.union(
        select(above.turn_id, above.parent_id, above.request_base).join(
            chain, above.turn_id.in_(needed)
        )
    )
    found = Turns.turn_id.in_(select(chain.c.turn_id))
    return _select(raw, expert_routing).where(found).order_by(Turns.seq)


def _select(raw: bool, expert_routing: bool) -> Select[Any]:
    return select(*_COLUMNS, *(_RAW if raw else ()), *(_EXPERT_ROUTING if expert_routing else ()))


# Built once: making a statement costs more than running it.
_ASKED = [*product((False, True), repeat=2)]  # raw, expert_routing
_OF_ROLLOUTS = {asked: _of_rollouts(*asked) for asked in _ASKED}
_WITH_ANCESTORS = {asked: _with_ancestors(*asked) for asked in _ASKED}


def _restore_turns(
    rows: Iterable[Row[Any]], placed: SharedTextsByTurn | None, *, expert_routing: bool
) -> list[Turn]:
    """`rows` are of one rollout, and hold every parent and every base before those who need it.

    Without `placed` requests and responses are left out, without `expert_routing` routed
    experts."""
    earlier = _RestoredSoFar()
    turns = []
    with _one_at_a_time:
        for row in rows:
            try:
                turns.append(_turn(row, earlier, placed, expert_routing=expert_routing))
            except StoreCorrupt as error:
                raise StoreCorrupt(f"turn {row.turn_id}: {error}") from error
    return turns


def _turn(
    row: Row[Any],
    earlier: _RestoredSoFar,
    placed: SharedTextsByTurn | None,
    *,
    expert_routing: bool,
) -> Turn:
    completion = unpack_ids(row.completion)
    if row.parent_id is None:
        parent = _TokenContext(token_id_array(), 0, ContextDigest())
    else:
        parent = require_earlier(earlier.contexts, row.parent_id)
    prompt, context = parent.extended(unpack_ids(row.delta), completion)
    if context.digest.value() != row.context_digest:
        raise StoreCorrupt("its tokens are not the ones that were stored")
    earlier.contexts[row.turn_id] = context
    logprobs = unpack_logprobs(row.logprobs)
    if len(logprobs) != len(completion):
        raise StoreCorrupt(f"{len(logprobs)} log-probabilities for {len(completion)} tokens")
    request, response = (
        (None, None) if placed is None else restore_content(row, placed, earlier.requests)
    )
    return Turn(
        **{name: getattr(row, name) for name in _PLAIN},
        prompt_token_ids=prompt,
        completion_token_ids=completion,
        completion_logprobs=logprobs,
        policy_versions=tuple((v, n) for v, n in row.policy_versions),
        sampling=_sampling(row.sampling),
        request=request,
        response=response,
        routed_experts=unpack_routing(row.routed_experts) if expert_routing else None,
    )


def _sampling(stored: Json) -> Json:
    if stored.get("source") == OLD_DEMONSTRATION:
        return {**stored, "source": DEMONSTRATION}
    return stored


def calling_spans(connection: Connection, rollout_id: str, *, except_dialect: str) -> list[str]:
    """The spans that the rollout's turns were called from, but for turns of one dialect."""
    query = select(Turns.parent_span_id).where(
        Turns.rollout_id == rollout_id,
        Turns.parent_span_id.is_not(None),
        Turns.dialect != except_dialect,
    )
    return [span_id for span_id in connection.scalars(query) if span_id is not None]


def rollout_of_turn(connection: Connection, turn_id: str) -> str | None:
    return connection.scalar(select(Turns.rollout_id).where(Turns.turn_id == turn_id))


def turn_order(connection: Connection, rollout_id: str) -> Sequence[str]:
    """The ids of the turns that `reward(turn=k)` counts, in order of capture."""
    query = (
        select(Turns.turn_id)
        .where(
            Turns.rollout_id == rollout_id,
            Turns.untrainable.is_distinct_from(UNACKNOWLEDGED),
        )
        .order_by(Turns.seq)
    )
    return list(connection.scalars(query))
