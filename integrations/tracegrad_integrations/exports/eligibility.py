"""Which turns and rollouts a layout takes, and the reasons why it leaves others out.

Reasons begin with what they count: "turns: greedy", "rollouts: no_reward".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from tracegrad.events import Json, Outcome, Turn
from tracegrad.store.copy.export_records import RolloutCopy
from tracegrad.store.encoding.blobs import dump_json
from tracegrad.transfer.layouts import Reasons
from tracegrad.transfer.token_rows import TokenRow, token_rows
from tracegrad_integrations.exports.conversations import Said, all_said

# A policy gradient needs tokens as the policy samples them; imitation takes any that were said.
_SAMPLED_OTHERWISE = frozenset(
    {
        *("greedy", "sampling_truncated", "sampling_penalised", "sampling_replaced"),
        *("constrained", "version_unknown"),
    }
)


def not_imitated(turn: Turn) -> str | None:
    """Why its tokens are no example to learn from, or None."""
    if turn.untrainable is not None and turn.untrainable not in _SAMPLED_OTHERWISE:
        return turn.untrainable
    if not turn.completion_token_ids:
        return "no_tokens"
    return None if turn.prompt_token_ids else "no_prompt"


def not_policy(turn: Turn) -> str | None:
    """Why its tokens are no sample of the policy, or None."""
    if turn.untrainable is not None:
        return turn.untrainable
    if not all(map(math.isfinite, turn.completion_logprobs)):
        return "non_finite"
    return not_imitated(turn)


def rows_of(
    copy: RolloutCopy, reason: Callable[[Turn], str | None], left_out: Reasons
) -> Iterator[TokenRow]:
    """Token rows of the turns without a reason; the others are counted."""
    why = {turn.turn_id: name for turn in copy.turns if (name := reason(turn)) is not None}
    left_out.update(f"turns: {name}" for name in why.values())
    return token_rows(copy.turns, why.keys())


def scored(copies: Sequence[RolloutCopy], left_out: Reasons) -> list[tuple[RolloutCopy, float]]:
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


def prompts(copies: Sequence[RolloutCopy], left_out: Reasons) -> Iterator[tuple[RolloutCopy, Said]]:
    """What rollouts of one task were first asked; the same words once."""
    known = []
    for copy in copies:
        said = all_said(copy, left_out)
        if not said:
            left_out["rollouts: no_text"] += 1
            continue
        first = (said[0].asked, said[0].tools)
        if first in known:
            left_out["rollouts: same_prompt"] += 1
            continue
        known.append(first)
        yield copy, said[0]


def truth_of(task: object) -> str:
    """What a task's answer is checked against: its `answer`, `ground_truth` or `label`, if it is
    an object that has one; else the task itself. As text."""
    if isinstance(task, dict):
        for field in ("ground_truth", "answer", "label"):
            if field in task:
                return _as_text(task[field])
    return "" if task is None else _as_text(task)


def about(copy: RolloutCopy) -> Json:
    """The task, for reward functions."""
    return {
        "task_id": copy.task_id,
        "agent": copy.agent,
        "task": None if copy.task is None else dump_json(copy.task),
    }


ABOUT = {"task_id": "text", "agent": "text", "task": "text"}


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else dump_json(value)
