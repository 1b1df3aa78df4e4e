"""Any turn tree comes back identical, and its tokens are stored once."""

from __future__ import annotations

from array import array
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from support.store.events import chain
from tracegrad.events import Turn, logprob_array, new_id, token_id_array
from tracegrad.store import Store
from tracegrad.store.encoding.blobs import unpack_ids
from tracegrad.store.models import Turns

INT32 = st.integers(min_value=-(2**31), max_value=2**31 - 1)
TOKENS = st.lists(INT32, max_size=6)


@st.composite
def trees(draw: st.DrawFn) -> list[Turn]:
    """Turns of one rollout, each a root or a child of any earlier one."""
    turns: list[Turn] = []
    for number in range(draw(st.integers(min_value=1, max_value=8))):
        parent = draw(st.sampled_from([None, *turns]))
        known = parent.prompt_token_ids + parent.completion_token_ids if parent else array("i")
        sampled = draw(TOKENS)
        split = draw(st.integers(min_value=0, max_value=len(sampled)))
        turns.append(
            Turn(
                turn_id=f"t{number}",
                rollout_id="r",
                parent_id=parent.turn_id if parent else None,
                dialect="chat",
                model=draw(st.text(max_size=5)).replace("\0", ""),
                prompt_token_ids=known + token_id_array(draw(TOKENS)),
                completion_token_ids=token_id_array(sampled),
                completion_logprobs=logprob_array(
                    draw(
                        st.lists(
                            st.floats(width=32, allow_nan=False),
                            min_size=len(sampled),
                            max_size=len(sampled),
                        )
                    )
                ),
                policy_versions=((1, split), (2, len(sampled) - split)),
                request=draw(st.none() | st.dictionaries(st.text(max_size=3), INT32, max_size=2)),
            )
        )
    return turns


def renamed(turns: list[Turn], rollout: str) -> list[Turn]:
    return [
        replace(
            turn,
            rollout_id=rollout,
            turn_id=f"{rollout}.{turn.turn_id}",
            parent_id=turn.parent_id and f"{rollout}.{turn.parent_id}",
        )
        for turn in turns
    ]


# One store for all examples: each is a rollout of its own.
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tree=trees(), data=st.data())
def test_a_random_tree_comes_back_identical(
    store: Store, tree: list[Turn], data: st.DataObject
) -> None:
    rollout = new_id()
    turns = renamed(tree, rollout)
    cut = data.draw(st.integers(min_value=0, max_value=len(turns)))
    store.append(turns[:cut])
    store.append(turns[cut:])
    assert store.rollout_turns(rollout) == turns
    for turn in turns:
        assert store.find_turn(turn.turn_id) == turn
    with store.reading() as connection:
        query = select(Turns.delta, Turns.completion).where(Turns.rollout_id == rollout)
        rows = connection.execute(query).all()
    # Each node of the tree holds what its parent's context lacks, and nothing else.
    contexts = {t.turn_id: len(t.prompt_token_ids) + len(t.completion_token_ids) for t in turns}
    once = sum(contexts[t.turn_id] - contexts.get(t.parent_id or "", 0) for t in turns)
    assert sum(len(unpack_ids(delta)) + len(unpack_ids(done)) for delta, done in rows) == once


def test_a_long_conversation_costs_its_length_once(store: Store) -> None:
    turns = chain("r", 200, new=range(100), sampled=range(50))
    for turn in turns:
        store.append([turn])
    with store.reading() as connection:
        rows = connection.execute(select(Turns.delta, Turns.completion)).all()
    assert sum(len(unpack_ids(a)) + len(unpack_ids(b)) for a, b in rows) == 200 * 150
    assert store.rollout_turns("r")[-1] == turns[-1]
