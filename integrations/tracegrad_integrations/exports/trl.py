"""Layouts of TRL: SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer. Checked with TRL 1.16.0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean

from tracegrad.events import Json
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.transfer.layouts import ExportLayout, ReasonCounter
from tracegrad_integrations.exports.conversations import ChatTurn, chat_turns, whole_conversations
from tracegrad_integrations.exports.eligibility import (
    TASK_COLUMNS,
    imitation_rows,
    prompts,
    scored_rollouts,
    task_columns,
)


def _sft(copies: Sequence[RolloutRecord], left_out: ReasonCounter) -> Iterator[Json]:
    for conversation in whole_conversations(copies, left_out):
        yield {"messages": conversation.messages, "tools": conversation.turns[-1].tools_text}


def _prompt_completion(copies: Sequence[RolloutRecord], left_out: ReasonCounter) -> Iterator[Json]:
    for copy in copies:
        for turn in chat_turns(copy, left_out):
            yield {"prompt": turn.prompt, "completion": [turn.reply], "tools": turn.tools_text}


def _preference(copies: Sequence[RolloutRecord], left_out: ReasonCounter) -> Iterator[Json]:
    """The best with the worst, the second best with the second worst, ... of equal prompts."""
    for group in _by_prompt(_answers(copies, left_out)):
        ranked = sorted(group, key=lambda answer: -answer[1])
        while len(ranked) > 1 and ranked[0][1] > ranked[-1][1]:
            (chosen, high), (rejected, low) = ranked.pop(0), ranked.pop()
            yield {
                "prompt": chosen.prompt,
                "chosen": [chosen.reply],
                "rejected": [rejected.reply],
                "tools": chosen.tools_text,
                "chosen_reward": high,
                "rejected_reward": low,
            }
        if ranked:
            left_out["rollouts: no_other_reward"] += len(ranked)


def _kto(copies: Sequence[RolloutRecord], left_out: ReasonCounter) -> Iterator[Json]:
    """Good or bad: above or below the mean of the rollouts with the same prompt."""
    for group in _by_prompt(_answers(copies, left_out)):
        mean = fmean(reward for _, reward in group)
        for turn, reward in group:
            if reward == mean:
                left_out["rollouts: mean_reward"] += 1
                continue
            yield {
                "prompt": turn.prompt,
                "completion": [turn.reply],
                "label": reward > mean,
                "tools": turn.tools_text,
                "reward": reward,
            }


def _grpo(copies: Sequence[RolloutRecord], left_out: ReasonCounter) -> Iterator[Json]:
    for copy, turn in prompts(copies, left_out):
        yield {"prompt": turn.prompt, **task_columns(copy)}


def _answers(
    copies: Sequence[RolloutRecord], left_out: ReasonCounter
) -> Iterator[tuple[ChatTurn, float]]:
    """Of rollouts that are one answer. TRL trains on all that comes after the prompt: of several
    turns that would be the messages of tools and users, too."""
    for copy, reward in scored_rollouts(copies, left_out):
        if len(copy.turns) > 1:
            left_out["rollouts: several_turns"] += 1
            continue
        turns = chat_turns(copy, left_out)
        if not copy.turns:
            left_out["rollouts: no_turns"] += 1
        for turn in turns:
            yield turn, reward


def _by_prompt(answers: Iterator[tuple[ChatTurn, float]]) -> list[list[tuple[ChatTurn, float]]]:
    groups: list[list[tuple[ChatTurn, float]]] = []
    for answer in answers:
        group = next((each for each in groups if each[0][0].asked == answer[0].asked), None)
        if group is None:
            groups.append(group := [])
        group.append(answer)
    return groups


SFT = ExportLayout(
    name="trl-sft",
    reader="trl.SFTTrainer (conversational language modeling)",
    columns={"messages": "messages", "tools": "text"},
    rows=_sft,
)
PROMPT_COMPLETION = ExportLayout(
    name="trl-prompt-completion",
    reader="trl.SFTTrainer (conversational prompt-completion)",
    columns={"prompt": "messages", "completion": "messages", "tools": "text"},
    rows=_prompt_completion,
)
TOKENS = ExportLayout(
    name="trl-tokens",
    reader="trl.SFTTrainer (pre-tokenized, with assistant_masks)",
    columns={"input_ids": "ids", "assistant_masks": "mask"},
    rows=partial(imitation_rows, mask="assistant_masks"),
    text=False,
)
PREFERENCE = ExportLayout(
    name="trl-preference",
    reader="trl.DPOTrainer (conversational preference)",
    columns={
        "prompt": "messages",
        "chosen": "messages",
        "rejected": "messages",
        "tools": "text",
        "chosen_reward": "number",
        "rejected_reward": "number",
    },
    rows=_preference,
)
KTO = ExportLayout(
    name="trl-kto",
    reader="trl.KTOTrainer (conversational unpaired preference)",
    columns={
        "prompt": "messages",
        "completion": "messages",
        "label": "flag",
        "tools": "text",
        "reward": "number",
    },
    rows=_kto,
)
GRPO = ExportLayout(
    name="trl-grpo",
    reader="trl.GRPOTrainer (conversational prompt-only)",
    columns={"prompt": "messages", **TASK_COLUMNS},
    rows=_grpo,
)
