"""One rollout of thousands of turns: a conversation with tool calls that never ends."""

from __future__ import annotations

from tracegrad.events import Json, RolloutStarted, Turn, logprob_array, token_id_array
from tracegrad.store import Store

LONG = "a-long-rollout"
_BATCH = 50


def add_long_rollout(store: Store, turns: int) -> None:
    """Unless it is there."""
    if store.rollout_of_turn(f"{LONG}.{turns - 1}") is not None:
        return
    store.append([RolloutStarted(rollout_id=LONG, task_id="long", opened_at=1_780_000_000.0)])
    messages: list[Json] = [{"role": "user", "content": "Go through all files."}]
    context = token_id_array(range(10))
    batch: list[Turn] = []
    for number in range(turns):
        sampled = token_id_array(range(number, number + 10))
        reply = {"role": "assistant", "content": f"I read file {number}."}
        batch.append(
            Turn(
                turn_id=f"{LONG}.{number}",
                rollout_id=LONG,
                parent_id=f"{LONG}.{number - 1}" if number else None,
                dialect="chat",
                model="m",
                prompt_token_ids=context[:],
                completion_token_ids=sampled,
                completion_logprobs=logprob_array([-0.5] * 10),
                policy_versions=((1, 10),),
                request={"model": "m", "messages": list(messages)},
                response={"choices": [{"index": 0, "message": reply}]},
                created_at=1_780_000_000.0 + number,
            )
        )
        context = context + sampled + token_id_array(range(10))
        messages += [reply, {"role": "user", "content": f"The file {number} has {number} lines."}]
        if len(batch) == _BATCH or number == turns - 1:
            store.append(batch)
            batch = []
