"""`tracegrad rollouts tree`: which turn continues which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from tracegrad.cli.render.rollout import rollout_title
from tracegrad.cli.render.table import TableColumn, render_table
from tracegrad.events import Turn
from tracegrad.inspect.display_text import finish_reason_text, format_number, one_line
from tracegrad.inspect.forks import expected_parent
from tracegrad.inspect.reasons import untrained_reason
from tracegrad.inspect.transcript import Transcript
from tracegrad.inspect.tree_layout import (
    PlacedTurn,
    TurnChain,
    group_samples,
    place_turns,
    sample_key,
    shorten_guide,
    turn_chains,
)
from tracegrad.inspect.turn_standing import RewardStandings
from tracegrad.store import RolloutDetail
from tracegrad.text_format import format_count

# At most so much of a line is what leads to a turn.
_GUIDE = 30


@dataclass(frozen=True, slots=True)
class _Row:
    place: PlacedTurn
    turn: Turn
    new: int | None  # prompt tokens that its parent lacks; None: the same prompt as the one above
    samples: int  # of its prompt, itself among them


def render_tree(detail: RolloutDetail, width: int | None) -> Iterator[Text]:
    yield rollout_title(detail, width)
    if not detail.turns:
        yield Text("no turns" + (": its spans are in `rollouts show`" if detail.spans else ""))
        return
    transcript = Transcript(detail.turns)
    roots = turn_chains(detail.turns)
    rows = _rows(group_samples(roots, detail.turns), transcript)
    head, *lines = render_table(_columns(rows, detail, transcript), rows, width)
    yield Text()
    yield head
    for row, line in zip(rows, lines, strict=True):
        if row.place.first and (why := _why(row, roots, detail, transcript)) is not None:
            note = Text.assemble((shorten_guide(row.place.above, _GUIDE), "dim"), why)
            if width is not None:
                note.truncate(width, overflow="ellipsis")
            yield note
        yield line
    yield Text()
    yield Text(_sum(roots, detail), style="dim")


def tree_json(detail: RolloutDetail) -> dict[str, Any]:
    """Nested at forks only: a chain of turns is one list."""
    transcript, standings = Transcript(detail.turns), RewardStandings(detail)
    roots = turn_chains(detail.turns)
    made: dict[int, dict[str, Any]] = {}
    every = list(roots)
    for branch in every:
        every += branch.branches
    for branch in reversed(every):
        made[id(branch)] = {
            "turns": [_turn_object(index, detail, transcript, standings) for index in branch.turns],
            "fork_reason": detail.turns[branch.turns[0]].fork_reason,
            "instead_of": expected_parent(branch.turns[0], transcript) if branch in roots else None,
            "branches": [made[id(child)] for child in branch.branches],
        }
    return {
        "rollout_id": detail.summary.rollout_id,
        "task_id": detail.summary.task_id,
        "outcome": detail.summary.outcome,
        "reward": detail.summary.reward,
        "roots": [made[id(root)] for root in roots],
    }


def _turn_object(
    index: int, detail: RolloutDetail, transcript: Transcript, standings: RewardStandings
) -> dict[str, Any]:
    turn = detail.turns[index]
    disposition = detail.dispositions.get(turn.turn_id)
    missing = untrained_reason(turn, detail)
    return {
        "turn": index,
        "turn_id": turn.turn_id,
        "new_prompt_tokens": len(turn.prompt_token_ids) - transcript.parent_tokens(index),
        "prompt_tokens": len(turn.prompt_token_ids),
        "completion_tokens": len(turn.completion_token_ids),
        "finish_reason": turn.finish_reason,
        "policy_versions": turn.policy_versions,
        "rewards": {
            reward.name: reward.value
            for reward in standings.of_turn(index)
            if standings.is_latest(reward)
        },
        "parent_span_id": turn.parent_span_id,
        "trained_step": disposition.step if disposition else None,
        "not_trained": missing.reason if missing else None,
    }


def _rows(roots: Sequence[TurnChain], transcript: Transcript) -> list[_Row]:
    prompts = Counter(map(sample_key, transcript.turns))
    seen: set[tuple[str | None, bytes]] = set()
    rows = []
    for place in place_turns(roots):
        turn = transcript.turns[place.turn]
        prompt = sample_key(turn)
        new = len(turn.prompt_token_ids) - transcript.parent_tokens(place.turn)
        rows.append(_Row(place, turn, None if prompt in seen else new, prompts[prompt]))
        seen.add(prompt)
    return rows


def _columns(
    rows: Sequence[_Row], detail: RolloutDetail, transcript: Transcript
) -> list[TableColumn[_Row]]:
    standings = RewardStandings(detail)
    columns: list[TableColumn[_Row]] = [
        TableColumn("turn", _index),
        TableColumn("new", _new, "right"),
        TableColumn(
            "sampled", lambda row: Text(f"{len(row.turn.completion_token_ids):,}"), "right"
        ),
        TableColumn("ended", _ended, min_width=10, drop_order=2),
        TableColumn("reward", lambda row: _reward(row, standings), min_width=12),
        TableColumn("version", _version, "right", drop_order=3),
        TableColumn("training", lambda row: _training(row, detail), min_width=14),
        TableColumn(
            "said",
            lambda row: _reply_line(row, transcript),
            min_width=10,
            max_width=80,
            drop_order=4,
        ),
    ]
    if not any(_reward(row, standings).plain for row in rows):
        columns = [column for column in columns if column.title != "reward"]
    return columns


def _index(row: _Row) -> Text:
    guide = shorten_guide(row.place.guide, _GUIDE)
    return Text.assemble((guide, "dim"), (str(row.place.turn), "bold"))


def _new(row: _Row) -> Text:
    return Text(
        "same" if row.new is None else f"{row.new:,}", style="dim" if row.new is None else ""
    )


def _ended(row: _Row) -> Text:
    ended = finish_reason_text(row.turn)
    style = "" if ended in ("stop", "tool_calls") else "yellow"
    return Text(one_line(ended), style=style)


def _reward(row: _Row, standings: RewardStandings) -> Text:
    given = filter(standings.is_latest, standings.of_turn(row.place.turn))
    named = (
        format_number(r.value) + (f" {one_line(r.name)}" if r.name != "reward" else "")
        for r in given
        if r.value is not None
    )
    return Text(", ".join(named), style="bold")


def _version(row: _Row) -> Text:
    versions = [version for version, amount in row.turn.policy_versions if amount]
    if not versions:
        return Text()
    first, last = versions[0], versions[-1]
    return Text(str(first) if len(versions) == 1 else f"{first}…{last}")


def _training(row: _Row, detail: RolloutDetail) -> Text:
    disposition = detail.dispositions.get(row.turn.turn_id)
    missing = untrained_reason(row.turn, detail)
    if missing is None:
        return Text(f"step {disposition.step if disposition else None}", style="green")
    return Text(one_line(missing.reason), style="yellow" if missing.final else "dim")


def _reply_line(row: _Row, transcript: Transcript) -> Text:
    reply = transcript.reply(row.place.turn)
    if reply is None:
        return Text()
    calls = [f"→ {call.name}({call.arguments})" for call in reply.calls]
    text = " ".join(filter(None, [reply.text, *calls])) or reply.reasoning
    return Text(one_line(text[:400]), style="dim")


def _why(
    row: _Row, roots: Sequence[TurnChain], detail: RolloutDetail, transcript: Transcript
) -> Text | None:
    """The note above a branch: why it begins here, and in which span."""
    turn, parts = row.turn, []
    if row.samples > 1 and row.new is not None:
        parts.append(f"{row.samples} samples of one prompt")
    if turn.fork_reason:
        parts.append(f"fork: {one_line(turn.fork_reason)}")
        rival = expected_parent(row.place.turn, transcript)
        if rival is not None:
            parts.append(f"instead of continuing turn {rival}")
    if len(roots) > 1 and turn.parent_id is None and row.new is not None:
        named = [s.name for s in detail.spans if s.span_id == turn.parent_span_id]
        parts += [f"in span {one_line(name)}" for name in named]
    return Text(", ".join(parts), style="yellow") if parts else None


def _sum(roots: Sequence[TurnChain], detail: RolloutDetail) -> str:
    every = list(roots)
    for branch in every:
        every += branch.branches
    leaves = sum(not branch.branches for branch in every)
    parts = [
        format_count(len(detail.turns), "turn"),
        format_count(len(roots), "root"),
        format_count(leaves, "path"),
    ]
    return " · ".join(parts)
