"""Which stored rollouts `trainer sft` learns from, and which of their turns: all that is left out
is counted with a reason.

Nothing is leased and nothing is marked as trained: turns that a step has used may be used again,
and reinforcement learning may still use those that were imitated here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tracegrad.events import Outcome, Turn
from tracegrad.store import RolloutFilter, Store
from tracegrad.store.copy.export_records import RolloutRecord, iter_rollouts
from tracegrad.store.types import HELD_OUT
from tracegrad.transfer.chat_conversations import NO_TOKENS
from tracegrad.turn_scopes import TurnScope, turn_scopes
from tracegrad_trainer.batches.filters import SAMPLING_REASONS, apply_predicate
from tracegrad_trainer.sft.tokenize import ReplyTokenizer, source_turn_id, tokenize_replies

_CUT_SHORT = frozenset({"length", "abort", "content_filter"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A rollout to learn from. Its turns are demonstrations now, whoever sampled them: at
    temperature 1, of no policy version; those that are context only say why (`untrainable`)."""

    rollout_id: str
    reward: float
    turns: list[Turn]


@dataclass(frozen=True, slots=True)
class ExampleGroup:
    """Rollouts to compare with each other: those of one task, or one that has none."""

    group_id: str
    rollouts: list[Example]


@dataclass(frozen=True, slots=True)
class ChosenExamples:
    """`reasons` begin with what they count: "rollouts: open", "turns: template"."""

    groups: list[ExampleGroup]
    found: int  # rollouts that match the filter
    reasons: Counter[str]
    scopes: Mapping[str, TurnScope]  # of their turns, by id

    @property
    def rollouts(self) -> int:
        return sum(len(task.rollouts) for task in self.groups)


def choose_examples(
    store: Store,
    wanted: RolloutFilter,
    *,
    writer: Callable[[], ReplyTokenizer] | None,
    compared: bool,
    mask_errors: bool = False,
    mask: str | None = None,
) -> ChosenExamples:
    """Rollouts that match and have ended; failures that are not the policy's are nobody's example,
    nor are held-out rollouts, unless `wanted` asks for them.

    Args:
        writer: asked once there is text, to make tokens of it; None: text is left out.
        compared: rollouts need a reward and a task.
        mask_errors: turns that went wrong (`error_reasons`) are context only.
        mask: `package.module:function(turn, rollout)`, a user's own say: True, False, or the
            reason why a turn is context only. It gets the turn as it was stored, and the rollout
            as a `RolloutRecord`.

    Raises:
        ValueError: text needs a chat template, and the model has none; `mask` fails.
    """
    reasons: Counter[str] = Counter()
    tasks: dict[str, ExampleGroup] = {}
    scopes: dict[str, TurnScope] = {}
    found = 0
    made: ReplyTokenizer | None = None
    for copy in iter_rollouts(store, wanted):
        found += 1
        why = HELD_OUT if copy.held_out and not wanted.held_out else _unfit(copy, compared=compared)
        if why is not None:
            reasons[f"rollouts: {why}"] += 1
            continue
        if made is None and writer is not None and any(_is_text(turn) for turn in copy.turns):
            made = writer()
        masked = dict(failed_turns(copy)) if mask_errors else {}
        if mask is not None:
            for turn in copy.turns:
                if why := apply_predicate(mask, turn, copy):  # type: ignore[arg-type]
                    masked[turn.turn_id] = why
        turns = list(_turns(copy, made, masked, reasons))
        scopes |= _scopes(copy, turns)
        group = copy.task_id or copy.rollout_id
        tasks.setdefault(group, ExampleGroup(group, [])).rollouts.append(
            Example(rollout_id=copy.rollout_id, reward=copy.reward or 0.0, turns=turns)
        )
    return ChosenExamples([tasks[name] for name in sorted(tasks)], found, reasons, scopes)


def _unfit(copy: RolloutRecord, *, compared: bool) -> str | None:
    if copy.outcome is None:
        return "open"
    if not Outcome(copy.outcome).scored:
        return copy.outcome
    if not copy.turns:
        return "no_turns"
    if compared and copy.reward is None:
        return "named_reward" if copy.rewards else "no_reward"
    return "no_task" if compared and copy.task_id is None else None


def _turns(
    copy: RolloutRecord,
    writer: ReplyTokenizer | None,
    masked: dict[str, str],
    reasons: Counter[str],
) -> Iterator[Turn]:
    for turn in copy.turns:
        if not _is_text(turn) or writer is None:
            why = turn.untrainable if turn.untrainable not in SAMPLING_REASONS else None
            yield _demonstrated(turn, why or masked.get(turn.turn_id))
    if writer is not None and any(map(_is_text, copy.turns)):
        said, left_out = tokenize_replies(copy.turns, writer)
        reasons.update({f"turns: {reason}": count for reason, count in left_out.items()})
        for turn in said:
            yield _demonstrated(turn, masked.get(source_turn_id(turn.turn_id)))


def _scopes(copy: RolloutRecord, turns: Sequence[Turn]) -> dict[str, TurnScope]:
    """By the ids of `turns`; one that was made of a text has that one's."""
    stored = turn_scopes(copy.turns, copy.spans, copy.agent)
    names = (turn.turn_id for turn in turns)
    return {name: stored.get(name) or stored[source_turn_id(name)] for name in names}


def _is_text(turn: Turn) -> bool:
    return turn.untrainable == NO_TOKENS


def _demonstrated(turn: Turn, why: str | None) -> Turn:
    """Without its texts, which are what is large."""
    sampling = {"source": "demonstration"}
    return replace(turn, sampling=sampling, untrainable=why, request=None, response=None)


def failed_turns(copy: RolloutRecord) -> Iterator[tuple[str, str]]:
    """Turns (by id) that went wrong.

    - `cut_short`: the reply did not come to its end
    - `error_span`: something that began between this turn and the next, a tool in general, ended
      with the status "error"
    - `agent_error`: the last turn of a rollout that ended so
    """
    failed = [span.start_ns / 1e9 for span in copy.spans if span.status == "error"]
    ends = [later.created_at for _, later in pairwise(copy.turns)] + [float("inf")]
    for turn, end in zip(copy.turns, ends, strict=True):
        if turn.finish_reason in _CUT_SHORT:
            yield turn.turn_id, "cut_short"
        elif any(turn.created_at <= start < end for start in failed):
            yield turn.turn_id, "error_span"
        elif turn is copy.turns[-1] and copy.outcome == Outcome.AGENT_ERROR.value:
            yield turn.turn_id, "agent_error"
