"""Rollouts as hypothesis makes them: trees of turns with tokens, whose texts mostly continue."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tracegrad.events import (
    UNACKNOWLEDGED,
    Reward,
    RolloutFinished,
    Turn,
    logprob_array,
    token_id_array,
)
from tracegrad.store.copy.export_records import RolloutRecord

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
_LOGPROBS = st.one_of(
    st.floats(-1e4, 0.0, width=32), st.sampled_from([float("nan"), float("-inf"), -0.0])
)
_CALL = st.builds(
    lambda name, arguments: {
        "id": f"call-{name}",
        "type": "function",
        "function": {"name": f"f{name}", "arguments": arguments},
    },
    st.integers(0, 3),
    st.sampled_from(['{"item":"lamp"}', "{}", "[1]", "no json"]),
)
REPLIES = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXTS},
    optional={
        "tool_calls": st.lists(_CALL, min_size=1, max_size=2),
        "reasoning_content": TEXTS.filter(bool),
    },
)
_MORE = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": TEXTS}),
        st.fixed_dictionaries(
            {
                "role": st.just("tool"),
                "tool_call_id": st.text("cal-013", max_size=7),
                "content": TEXTS,
            }
        ),
        REPLIES,
    ),
    min_size=1,
    max_size=3,
)


# A reward's value, and the turn that it is for; one that is not there, too.
_GIVEN = st.tuples(st.floats(-1e6, 1e6), st.none() | st.integers(-6, 5))


@st.composite
def rollout_records(draw: st.DrawFn) -> RolloutRecord:
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 5))):
        turns.append(_turn(draw, number, draw(st.sampled_from([None, *turns]))))
    rewards = [
        Reward(
            reward_id=f"w{n}",
            rollout_id="r",
            value=value,
            turn=turn,
            source="direct",
            created_at=3.0,
        )
        for n, (value, turn) in enumerate(draw(st.lists(_GIVEN, max_size=4)))
    ]
    end = RolloutFinished(rollout_id="r", finished_at=4.0)
    return RolloutRecord(
        rollout_id="r",
        opened_at=1.5,
        task_id=draw(st.none() | TEXTS.filter(bool)),
        agent=draw(st.none() | st.just("planner") | TEXTS.filter(bool)),
        tags={"k": draw(TEXTS)} if draw(st.booleans()) else {},
        task=draw(st.none() | TEXTS | st.fixed_dictionaries({"answer": st.integers(0, 9)})),
        outcome="completed",
        finished_at=4.0,
        outcomes=[end],
        rewards=rewards,
        turns=turns,
    )


def _turn(draw: st.DrawFn, number: int, parent: Turn | None) -> Turn:
    context = parent.prompt_token_ids + parent.completion_token_ids if parent else token_id_array()
    prompt, completion = context + token_id_array(draw(_IDS)), draw(_IDS)
    first = draw(st.integers(0, len(completion)))
    versions = ((1, first), (2, len(completion) - first))
    texts: dict[str, Any] = {}
    if draw(st.integers(0, 4)):
        before: list[Any] = []
        if parent and parent.request and draw(st.integers(0, 4)):
            replied = (parent.response or {})["choices"][0]["message"]
            before = [*parent.request["messages"], replied]
        request: dict[str, Any] = {"model": "m", "messages": [*before, *draw(_MORE)]}
        reply = draw(REPLIES)
        texts = {"request": request, "response": {"choices": [{"message": reply}]}}
    return Turn(
        turn_id=f"t{number}",
        rollout_id="r",
        parent_id=parent.turn_id if parent else None,
        fork_reason=draw(st.none() | st.just("edited_history")),
        dialect="chat",
        model="m",
        prompt_token_ids=prompt,
        completion_token_ids=token_id_array(completion),
        completion_logprobs=logprob_array(draw(_LOGPROBS) for _ in completion),
        policy_versions=tuple((v, n) for v, n in versions if n),
        sampling={"temperature": 0.7} if draw(st.booleans()) else {},
        finish_reason=draw(st.none() | st.sampled_from(["stop", "length"])),
        untrainable=draw(st.none() | st.sampled_from(["greedy", UNACKNOWLEDGED])),
        agent_name=draw(st.none() | st.sampled_from(["planner", "writer"])),
        asked_model=draw(st.none() | st.just("coder-model")),
        created_at=2.0 + number,
        **texts,
    )
