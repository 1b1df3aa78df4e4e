"""Which turns and rollouts a layout takes, and the reasons why it leaves others out.

Reasons begin with what they count: "turns: greedy", "rollouts: no_reward".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from tracegrad.events import Json, Outcome, Turn
from tracegrad.jsonutil import dump_json, text_or_json
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.transfer.layouts import ReasonCounter
from tracegrad.transfer.token_rows import TokenRow, token_rows
from tracegrad_integrations.exports.conversations import ChatTurn, chat_turns

# A policy gradient needs tokens as the policy samples them; imitation takes any reply.
_SAMPLED_OTHERWISE = frozenset(
    {
        *("greedy", "sampling_truncated", "sampling_penalised", "sampling_replaced"),
        *("constrained", "version_unknown"),
    }
)


def imitation_exclusion(turn: Turn) -> str | None:
    """Why its tokens are no example to learn from, or None."""
    if turn.untrainable is not None and turn.untrainable not in _SAMPLED_OTHERWISE:
        return turn.untrainable
    if not turn.completion_token_ids:
        return "no_tokens"
    return None if turn.prompt_token_ids else "no_prompt"


def policy_exclusion(turn: Turn) -> str | None:
    """Why its tokens are no sample of the policy, or None."""
    if turn.untrainable is not None:
        return turn.untrainable
    if not all(map(math.isfinite, turn.completion_logprobs)):
        return "non_finite"
    return imitation_exclusion(turn)


def imitation_rows(
    copies: Sequence[RolloutRecord], left_out: ReasonCounter, *, mask: str
) -> Iterator[Json]:
    """Tokens to imitate, and under `mask` 1 where they are."""
    for copy in copies:
        for row in eligible_rows(copy, imitation_exclusion, left_out):
            yield {"input_ids": row.token_ids.tolist(), mask: row.mask}


def eligible_rows(
    copy: RolloutRecord, reason: Callable[[Turn], str | None], left_out: ReasonCounter
) -> Iterator[TokenRow]:
    """Token rows of the turns without a reason; the others are counted."""
    why = {turn.turn_id: name for turn in copy.turns if (name := reason(turn)) is not None}
    left_out.update(f"turns: {name}" for name in why.values())
    return token_rows(copy.turns, why.keys())


def scored_rollouts(
    copies: Sequence[RolloutRecord], left_out: ReasonCounter
) -> list[tuple[RolloutRecord, float]]:
    """Finished rollouts that the policy is to be judged by, with their rewards."""
    found = []
    for copy in copies:
        if copy.outcome is None:
            left_out["rollouts: open"] += 1
        elif not Outcome(copy.outcome).scored:
            left_out[f"rollouts: {copy.outcome}"] += 1
        elif copy.reward is None:
            left_out["rollouts: no_reward"] += 1
        else:
            found.append((copy, copy.reward))
    return found


def prompts(
    copies: Sequence[RolloutRecord], left_out: ReasonCounter
) -> Iterator[tuple[RolloutRecord, ChatTurn]]:
    """What rollouts of one task were first asked; the same words once."""
    known = []
    for copy in copies:
        turns = chat_turns(copy, left_out)
        if not turns:
            left_out["rollouts: no_text"] += 1
            continue
        if turns[0].asked in known:
            left_out["rollouts: same_prompt"] += 1
            continue
        known.append(turns[0].asked)
        yield copy, turns[0]


def ground_truth(task: object) -> str:
    """What a task's answer is checked against: its `answer`, `ground_truth` or `label`, if it is
    an object that has one; else the task itself. As text."""
    if isinstance(task, dict):
        for field in ("ground_truth", "answer", "label"):
            if field in task:
                return text_or_json(task[field])
    return "" if task is None else text_or_json(task)


def task_columns(copy: RolloutRecord) -> Json:
    """The task, for reward functions."""
    return {
        "task_id": copy.task_id,
        "agent": copy.agent,
        "task": None if copy.task is None else dump_json(copy.task),
    }


TASK_COLUMNS = {"task_id": "text", "agent": "text", "task": "text"}
