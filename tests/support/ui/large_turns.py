"""Turns of one rollout, "large", that each begin afresh."""

from __future__ import annotations

from collections.abc import Sequence

from tracegrad.events import Json, Turn, logprob_array, token_id_array


def large_turn(
    number: int,
    messages: Sequence[Json] = (),
    reply: Json | None = None,
    *,
    sampled: int = 1,
) -> Turn:
    """`sampled` tokens. Without a `reply` it has no texts."""
    choice = {"index": 0, "message": {"role": "assistant", **(reply or {})}}
    return Turn(
        turn_id=f"large.{number}",
        rollout_id="large",
        dialect="chat",
        model="m",
        prompt_token_ids=token_id_array([number]),
        completion_token_ids=token_id_array([7] * sampled),
        completion_logprobs=logprob_array([-0.5] * sampled),
        policy_versions=((1, sampled),),
        request=None if reply is None else {"model": "m", "messages": list(messages)},
        response=None if reply is None else {"choices": [choice]},
        created_at=1_780_000_000.0 + number,
    )
