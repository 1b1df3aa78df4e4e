"""`tracegrad rollouts explain [ID]`: why trees forked, why turns are not trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.text import Text

from tracegrad.cli.render.console import hanging, indented, rule
from tracegrad.cli.render.rollout import rollout_title
from tracegrad.cli.render.rollout_list import short_id_width
from tracegrad.inspect.asked_settings import SETTINGS_REASONS, AskedSettings, asked_settings
from tracegrad.inspect.display_text import format_number, format_ranges, one_line
from tracegrad.inspect.forks import (
    ForkFinding,
    FrameDifference,
    MessageDifference,
    TokenDifference,
    TokenTotals,
    find_forks,
    token_totals,
)
from tracegrad.inspect.reasons import (
    ReasonText,
    UntrainedReason,
    describe_failed_scorings,
    describe_idle,
    fork_text,
    untrained_reason,
    untrained_text,
    waiting_text,
)
from tracegrad.inspect.transcript import Message, Transcript
from tracegrad.store import RolloutDetail
from tracegrad.store.read.reason_counts import ReasonCount, ReasonCounts
from tracegrad.text_format import format_count
from tracegrad.turn_tree import common_prefix

_MARGIN, _COLUMN = 2, 11
_EXCERPT = 160  # characters of a message around where it differs
_LEAD = 30  # of them before that place

# (label, body, style) -> lines
_Row = Callable[..., Iterator[Text]]


def render_explanation(detail: RolloutDetail, width: int | None) -> Iterator[Text]:
    yield rollout_title(detail, width)
    if not detail.turns:
        yield Text("no turns")
        if detail.summary.state == "no_turns":
            yield from _advice(_no_turns(detail), margin=_MARGIN, width=width)
        return
    transcript = Transcript(detail.turns)
    found = find_forks(transcript)
    for group in _alike(found):
        yield Text()
        yield from _fork(group[0], width) if len(group) == 1 else _beginnings(group, width)
    if not found:
        none = Text("no forks: every turn continues another, or samples the same prompt")
        yield from indented(none, margin=0, width=width)
    yield Text()
    yield from _untrained(detail, width)
    yield Text()
    yield from _totals(token_totals(transcript, found), width)


def explanation_json(detail: RolloutDetail) -> dict[str, Any]:
    transcript = Transcript(detail.turns)
    found = find_forks(transcript)
    return {
        "rollout_id": detail.summary.rollout_id,
        "forks": [_with_text(asdict(fork), fork_text, fork.reason) for fork in found],
        "not_trained": [
            _with_text(
                {"reason": reason, "final": final, "turns": turns},
                partial(waiting_text, detail=detail),
                reason,
            )
            | _asked_json(asked_settings(reason, [detail.turns[index] for index in turns]))
            for (reason, final), turns in _by_reason(detail).items()
        ]
        or _no_turns_json(detail),
        "tokens": asdict(token_totals(transcript, found)),
        "unnamed_calls": detail.unnamed_calls,
        "idle": describe_idle(detail.summary, detail.trainer_idle_s),
        "continues": detail.summary.continues,
        "failed_scorings": [asdict(each) for each in detail.failed_scorings],
    }


def _no_turns_json(detail: RolloutDetail) -> list[dict[str, Any]]:
    """Why a rollout that ended without a turn is not trained."""
    if detail.turns or detail.summary.state != "no_turns":
        return []
    words = _no_turns(detail)
    found = {"reason": "no_turns", "final": False, "turns": []}
    return [found | {"meaning": words.meaning, "fix": words.fix} | _asked_json(None)]


def _asked_json(asked: AskedSettings | None) -> dict[str, Any]:
    return {"asked_for": []} if asked is None else {"asked_for": asked.fields, "fix": asked.fix}


def _with_text(found: dict[str, Any], words: Any, reason: str | None) -> dict[str, Any]:
    text: ReasonText | None = words(reason) if reason is not None else None
    return {
        **found,
        "meaning": text.meaning if text else None,
        "fix": text.fix if text else None,
    }


# Forks


def _alike(found: Sequence[ForkFinding]) -> list[list[ForkFinding]]:
    """Each fork alone, but turns that could have continued nothing together by their reason."""
    groups: dict[tuple[str | None, int | None], list[ForkFinding]] = {}
    for fork in found:
        alone = fork.turn if fork.parent is not None or fork.instead_of is not None else None
        groups.setdefault((fork.reason, alone), []).append(fork)
    return list(groups.values())


def _rows(width: int | None) -> _Row:
    def row(label: str, body: Text | str, style: str = "dim") -> Iterator[Text]:
        text = Text(body) if isinstance(body, str) else body
        return hanging(Text(label, style=style), text, column=_COLUMN, width=width, margin=_MARGIN)

    return row


def _title(turns: str, reason: str | None, width: int | None) -> Text:
    title = one_line(reason or "begins afresh")
    return rule(Text.assemble((turns, "bold"), (f"  {title}", "bold yellow")), width)


def _reason(reason: str | None, row: _Row) -> Iterator[Text]:
    if reason is None:
        yield from row("why", "No reason was recorded: tokens continue no earlier turn.")
        return
    words = fork_text(reason)
    yield from row("why", words.meaning)
    if words.fix:
        yield from row("fix", words.fix)


def _beginnings(found: Sequence[ForkFinding], width: int | None) -> Iterator[Text]:
    """Of turns that could have continued nothing."""
    row = _rows(width)
    reason = found[0].reason
    yield _title(f"turns {format_ranges([fork.turn for fork in found])}", reason, width)
    yield from _reason(reason, row)
    yield from row("instead", "there are no earlier turns that they could have continued")
    new = sum(fork.prompt - fork.shared for fork in found)
    again = sum(fork.again for fork in found)
    sent = sum(fork.prompt for fork in found)
    cost = f"{new:,} of their {sent:,} prompt tokens are new; stored a second time: {again:,}"
    yield from row("cost", cost)


def _fork(fork: ForkFinding, width: int | None) -> Iterator[Text]:
    row = _rows(width)
    yield _title(f"turn {fork.turn}", fork.reason, width)
    yield from _reason(fork.reason, row)
    yield from row("instead", _instead(fork))
    if fork.message is not None and fork.instead_of is not None:
        yield from row("message", f"number {fork.message.position} is the first that differs:")
        yield from _messages(fork.message, fork, row)
    elif fork.texts:
        yield from row("messages", f"all of turn {fork.instead_of}'s are there, with its reply")
    if fork.ids_changed:
        yield from row("ids", "the client gave tool calls other ids; that alone is no reason")
    if fork.frame is not None:
        yield from _frame(fork.frame, row)
    yield from _tokens(fork, row)


def _frame(found: FrameDifference, row: _Row) -> Iterator[Text]:
    for label, what, names in (
        ("tools", "gone", found.gone),
        ("tools", "new", found.new),
        ("tools", "changed", found.changed),
        ("template", "arguments", found.arguments),
    ):
        if names:
            yield from row(label, f"{what}: {', '.join(map(one_line, names))}")


def _instead(fork: ForkFinding) -> str:
    if fork.instead_of is None:
        other = "there is no earlier turn that it could have continued"
        return other if fork.parent is None else f"it continues turn {fork.parent}; {other} further"
    if fork.parent == fork.instead_of:
        return f"it continues turn {fork.parent} all the same"
    instead = f"of continuing turn {fork.instead_of}"
    return instead if fork.parent is None else f"{instead} it continues turn {fork.parent}"


def _messages(found: MessageDifference, fork: ForkFinding, row: _Row) -> Iterator[Text]:
    before, now = (_message_line(each) for each in (found.before, found.now))
    start = common_prefix(before, now)
    for label, message, text, style in (
        (f"- turn {fork.instead_of}", found.before, before, "red"),
        (f"+ turn {fork.turn}", found.now, now, "green"),
    ):
        body = Text("(no more messages)", style=style)
        if message is not None:
            role = "assistant" if message.role == "reply" else one_line(message.role)
            body = Text(f"{role}: {_excerpt(text, start)}", style=style)
        yield from row(label, body, style)
    if before == now and found.before is not None and found.now is not None:
        yield from row("differ", _unseen_difference(found.before, found.now))


def _unseen_difference(before: Message, now: Message) -> str:
    """Of two messages that are the same in one line."""
    if before.text != now.text:
        return "in white space alone"
    return "in a field that is not shown (tracegrad rollouts show --json has all of them)"


def _message_line(message: Message | None) -> str:
    """A message in one line."""
    if message is None:
        return ""
    calls = (f"→ {call.name}({call.arguments})" for call in message.calls)
    reasoning = f"({message.reasoning})" if message.reasoning else ""
    return one_line(" ".join(filter(None, [reasoning, message.text, *calls])))


def _excerpt(text: str, at: int) -> str:
    start = max(0, at - _LEAD)
    end = start + _EXCERPT
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")


def _tokens(fork: ForkFinding, row: _Row) -> Iterator[Text]:
    found = fork.tokens
    if found is None:
        missing = (
            "the engine returned none of this call" if not fork.prompt else "none to compare with"
        )
        yield from row("tokens", f"{missing}: what it continues is known by its messages alone")
        return
    other = fork.instead_of if fork.instead_of is not None else fork.like
    into = found.in_reply
    if into is not None and fork.message is None and fork.reply is not None:
        yield from row("reply", _excerpt(_message_line(fork.reply), 0))
    where = "prompt" if into is None else f"reply, after {format_count(into, 'token')}"
    shared = f"{format_count(found.position, 'token')} shared with turn {other}"
    yield from row("tokens", f"{shared}; they part in its {where}:")
    for label, ids, style in (
        (f"- turn {other}", found.before, "red"),
        (f"+ turn {fork.turn}", found.now, "green"),
    ):
        yield from row(label, _ids(ids, found, style), style)
    yield from row("cost", _cost(fork))


def _ids(ids: Sequence[int], found: TokenDifference, style: str) -> Text:
    text = Text("… " if found.start else "")
    at = found.position - found.start
    text.append(" ".join(map(str, ids[:at])) + " ")
    if at >= len(ids):
        return text.append("(ends)", style=style)
    text.append(f"[{ids[at]}]", style=f"bold {style}")
    return text.append(" " + " ".join(map(str, ids[at + 1 :])))


def _cost(fork: ForkFinding) -> str:
    new = f"{fork.prompt - fork.shared:,} of its {fork.prompt:,} prompt tokens are new"
    if not fork.again:
        return new
    return (
        f"{new}; stored a second time: {fork.again:,} (they are in turn {fork.like}), and computed "
        "again unless the engine's prefix cache had them"
    )


# Training


def _by_reason(detail: RolloutDetail) -> dict[UntrainedReason, list[int]]:
    """The turns that are not trained, by why; most first."""
    found: dict[UntrainedReason, list[int]] = {}
    for index, turn in enumerate(detail.turns):
        missing = untrained_reason(turn, detail)
        if missing is not None:
            found.setdefault(missing, []).append(index)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _untrained(detail: RolloutDetail, width: int | None) -> Iterator[Text]:
    by_reason = _by_reason(detail)
    missing = sum(map(len, by_reason.values()))
    yield rule(Text("training", style="bold"), width)
    trained = len(detail.turns) - missing
    step = f" in step {detail.summary.consumed_step}" if trained else ""
    line = Text(f"{trained:,} of {format_count(len(detail.turns), 'turn')} trained{step}")
    yield from indented(line, margin=_MARGIN, width=width)
    for known in (_closed(detail), _continued(detail)):
        if known:
            yield from indented(Text(known), margin=_MARGIN, width=width)
    if late := sum(map(detail.came_late, detail.rewards)):
        came = f"{format_count(late, 'reward')} came when training had taken the others: not used"
        yield from indented(Text(came, style="yellow"), margin=_MARGIN, width=width)
    for error in describe_failed_scorings(detail.failed_scorings):
        failed = Text(f"not scored: {one_line(error)}", style="yellow")
        yield from indented(failed, margin=_MARGIN, width=width)
    for (reason, final), turns in by_reason.items():
        words = waiting_text(reason, detail)
        which = f"  {format_count(len(turns), 'turn')}: {format_ranges(turns)}"
        label = Text.assemble((one_line(reason), "yellow" if final else "bold"), (which, "dim"))
        yield from indented(label, margin=_MARGIN, width=width)
        asked = asked_settings(reason, [detail.turns[index] for index in turns])
        yield from _advice(words, margin=_MARGIN + 2, width=width, asked=asked)
        if reason in ("named_reward", "scoring_failed") and _rewards_given(detail):
            given = Text(f"given so far: {_rewards_given(detail)}", style="dim")
            yield from indented(given, margin=_MARGIN + 2, width=width)


def _closed(detail: RolloutDetail) -> str | None:
    return describe_idle(detail.summary) if detail.summary.idle_s is not None else None


def _continued(detail: RolloutDetail) -> str | None:
    before = detail.summary.continues
    if before is None:
        return None
    return f"it goes on from rollout {one_line(before)}, which training had taken"


def _rewards_given(detail: RolloutDetail) -> str:
    """`score` (0.5), `format` of turn 2 (1): the last of each, unless it was taken back."""
    last = {(each.name, each.turn): each.value for each in detail.rewards}
    return ", ".join(
        f"{one_line(name)!r}{'' if turn is None else f' of turn {turn}'} ({format_number(value)})"
        for (name, turn), value in last.items()
        if value is not None
    )


def _no_turns(detail: RolloutDetail) -> ReasonText:
    words = untrained_text("no_turns")
    if not detail.unnamed_calls:
        return words
    calls = format_count(detail.unnamed_calls, "call")
    return ReasonText(
        f"{words.meaning} {calls} that named no rollout came to the proxy while it was open.",
        "If they were its own, its client has the proxy's plain address: give it the rollout's "
        "base URL or key; see docs/agents.md.",
    )


def _advice(
    words: ReasonText, *, margin: int, width: int | None, asked: AskedSettings | None = None
) -> Iterator[Text]:
    yield from indented(Text(words.meaning), margin=margin, width=width)
    if asked is not None:
        fields = one_line(", ".join(asked.fields))
        yield from indented(Text(f"The agent asked for: {fields}"), margin=margin, width=width)
    fix = words.fix if asked is None else asked.fix
    if fix:
        yield from indented(Text(f"→ {fix}", style="dim"), margin=margin, width=width)


def _totals(found: TokenTotals, width: int | None) -> Iterator[Text]:
    yield rule(Text("tokens", style="bold"), width)
    rows = [
        (found.sent, f"sent as prompts of {format_count(found.turns, 'turn')}"),
        (found.sampled, "sampled"),
        (found.stored, "stored: each turn keeps what its parent lacks"),
        (found.again, "of them a second time, because of forks"),
        (
            found.trained_on,
            f"on {format_count(found.paths, 'path')} from {format_count(found.roots, 'root')}: "
            "what training would read; a sampled token is trained on one path only",
        ),
    ]
    column = max(len(f"{amount:,}") for amount, _ in rows)
    for amount, words in rows:
        label = Text(f"{amount:,}".rjust(column))
        yield from hanging(label, Text(words), column=column + 2, width=width, margin=_MARGIN)


def render_reason_counts(found: ReasonCounts, width: int | None) -> Iterator[Text]:
    waiting = sum(each.turns for each in found.not_trained if not each.final)
    lost = found.turns - found.trained - waiting
    line = f"{format_count(found.turns, 'turn')} in {format_count(found.rollouts, 'rollout')}: "
    line += f"{found.trained:,} trained, {lost:,} not, {waiting:,} wait"
    yield from indented(Text(line), margin=0, width=width)
    shown = short_id_width([each.example for each in (*found.not_trained, *found.forks)])
    for title, rows in (
        ("why turns were not trained", [each for each in found.not_trained if each.final]),
        ("what the others wait for", [each for each in found.not_trained if not each.final]),
        ("why turns continue no earlier one", found.forks),
    ):
        if not rows:
            continue
        yield Text()
        yield rule(Text(title, style="bold"), width)
        for each in rows:
            words = fork_text(each.reason) if rows is found.forks else untrained_text(each.reason)
            yield from _reason_count(each, words, width, shown)


def _reason_count(
    each: ReasonCount, words: ReasonText, width: int | None, shown: int
) -> Iterator[Text]:
    head = Text.assemble(
        (f"{each.turns:,}", "bold"), (f"  {one_line(each.reason)}", "yellow" if each.final else "")
    )
    example = (
        f"  in {format_count(each.rollouts, 'rollout')}, newest {one_line(each.example[:shown])}"
    )
    head.append(example, style="dim")
    yield from indented(head, margin=_MARGIN, width=width)
    yield from _advice(words, margin=_MARGIN + 3, width=width)
    if each.reason in SETTINGS_REASONS:
        one = f"`explain {one_line(each.example[:shown])}` says what was asked for, and what helps."
        yield from indented(Text(one, style="dim"), margin=_MARGIN + 3, width=width)


def reason_counts_json(found: ReasonCounts) -> dict[str, Any]:
    return {
        **asdict(found),
        "not_trained": [
            asdict(each) | untrained_text(each.reason)._asdict() for each in found.not_trained
        ],
        "forks": [
            {k: v for k, v in asdict(each).items() if k != "final"}
            | fork_text(each.reason)._asdict()
            for each in found.forks
        ],
    }
