"""One turn as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.text import Text

from tracegrad.cli.render.console import hanging, indented, rule
from tracegrad.events import Reward, Turn
from tracegrad.inspect.display_text import (
    clip,
    finish_reason_text,
    format_number,
    one_line,
    printable,
)
from tracegrad.inspect.forks import expected_parent
from tracegrad.inspect.reasons import fork_text, untrained_reason, untrained_text
from tracegrad.inspect.transcript import Message, RepeatedMessages, Transcript
from tracegrad.inspect.turn_standing import (
    RewardStandings,
    disposition_text,
    late_by,
    versions_text,
)
from tracegrad.jsonutil import text_or_json
from tracegrad.store import RolloutDetail
from tracegrad.text_format import format_count, format_duration, format_time

COLUMN = 11
_MARGIN = 2
_ROLE_STYLE = {"system": "dim", "developer": "dim", "user": "bold", "tool": "yellow",
               "reply": "green", "assistant": "green"}  # fmt: skip
# Lines and characters of a message; the model's own words and the user's are what one reads for.
_LIMITS_BY_ROLE = {"system": (4, 400), "developer": (4, 400), "tool": (8, 800)}
_DEFAULT_LIMITS = (16, 1200)
_LONGEST_COMMENT = 200  # characters
_DISPOSITION_STYLE = {"trained": "green", "waiting": "", "untrained": "yellow"}


@dataclass(frozen=True, slots=True)
class TurnView:
    """How much: whole messages (`full`), token ids (`tokens`). `explained`: reasons that are said
    above with their meaning. `of_rollout`: the one that is said above of the whole rollout; a turn
    that has it says nothing."""

    detail: RolloutDetail
    transcript: Transcript
    standings: RewardStandings
    width: int | None
    full: bool = False
    tokens: bool = False
    explained: set[str] = field(default_factory=set)
    of_rollout: str | None = None

    def meaning_once(self, reason: str, meaning: str) -> str:
        """`: meaning` where the reason comes first, nothing below."""
        if reason in self.explained:
            return ""
        self.explained.add(reason)
        return f": {meaning}"


def render_turn(index: int, how: TurnView) -> Iterator[Text]:
    """What is new in it: messages that an earlier turn had are only counted."""
    yield from _about(index, how)
    if index == 0 or how.transcript.tools(index) != how.transcript.tools(index - 1):
        yield from _tools(index, how)
    for news in how.transcript.new_messages(index):
        if isinstance(news, RepeatedMessages):
            elided = f"… {format_count(news.messages, 'message')} as in turn {news.of_turn}"
            yield from _row("", Text(elided, style="dim italic"), how)
        else:
            yield from _message(news, how)
    yield from _reply(index, how)
    if how.tokens:
        yield from _ids(index, how)


def render_full_turn(index: int, how: TurnView) -> Iterator[Text]:
    """All that is recorded of it, every message in full."""
    turn = how.detail.turns[index]
    yield from _about(index, how)
    yield from _row("id", Text(one_line(turn.turn_id)), how)
    yield from _row("made", Text(f"{format_time(turn.created_at)} in {turn.dialect}"), how)
    asked = f", asked for as {turn.asked_model}" if turn.asked_model is not None else ""
    yield from _row("model", Text(one_line(turn.model + asked)), how)
    if turn.sampling:
        settings = (f"{name}={text_or_json(value)}" for name, value in turn.sampling.items())
        yield from _row("sampling", Text(one_line(" ".join(settings))), how)
    versions = ", ".join(f"{format_count(n, 'token')} by {v}" for v, n in turn.policy_versions)
    if versions:
        yield from _row("versions", Text(versions), how)
    if turn.parent_span_id is not None:
        yield from _row("span", Text(_span_name(turn, how.detail)), how)
    yield from _tools(index, how)
    for message in how.transcript.messages(index):
        yield from _message(message, how)
    yield from _reply(index, how)
    if turn.request is None:
        yield from _row("", Text("the request was not kept", style="dim italic"), how)
    if how.tokens:
        yield from _ids(index, how)


def _about(index: int, how: TurnView) -> Iterator[Text]:
    turn = how.detail.turns[index]
    yield rule(turn_title(index, how), how.width)
    yield from indented(_summary(turn, how.detail), margin=_MARGIN, width=how.width)
    if turn.agent_name is not None:
        yield from _row("agent", Text(one_line(turn.agent_name)), how)
    if turn.fork_reason:
        rival = expected_parent(index, how.transcript)
        instead = f", instead of continuing turn {rival}" if rival is not None else ""
        meaning = how.meaning_once(turn.fork_reason, fork_text(turn.fork_reason).meaning)
        why = f"{one_line(turn.fork_reason)}{instead}{meaning}"
        yield from _row("fork", Text(why, style="yellow"), how)
    missing = untrained_reason(turn, how.detail)
    if missing is not None and missing.final and missing.reason != how.of_rollout:
        meaning = how.meaning_once(missing.reason, untrained_text(missing.reason).meaning)
        if meaning:  # the turn's title has the reason itself
            why = f"{one_line(missing.reason)}{meaning}"
            yield from _row("untrained", Text(why, style="yellow"), how)
    for reward in how.standings.of_turn(index):
        yield from _row("reward", reward_text(reward, how.detail, how.standings), how)


def turn_title(index: int, how: TurnView) -> Text:
    turn, parent = how.detail.turns[index], how.transcript.parent(index)
    title = Text(f"turn {index}", style="bold")
    if turn.parent_id is None:
        title.append("  starts afresh" if index > 0 else "", style="not bold")
    elif parent is None or parent != index - 1:
        title.append(f"  continues turn {'?' if parent is None else parent}", style="not bold")
    missing = untrained_reason(turn, how.detail)
    if missing is not None and missing.reason == how.of_rollout:
        return title
    disposition, kind = disposition_text(turn, how.detail)
    return title.append("  ").append(disposition, style=f"not bold {_DISPOSITION_STYLE[kind]}")


def _summary(turn: Turn, detail: RolloutDetail) -> Text:
    sampled = len(turn.completion_token_ids)
    parts = [f"+{format_duration(max(0.0, turn.created_at - detail.summary.opened_at))}"]
    if sampled or turn.prompt_token_ids:
        parts.append(f"{len(turn.prompt_token_ids):,} prompt + {format_count(sampled, 'token')}")
    else:
        parts.append("no tokens")
    parts.append(versions_text(turn))
    if sampled:
        parts.append(f"logprob {sum(turn.completion_logprobs) / sampled:.3f}")
    parts.append(finish_reason_text(turn))
    return Text(" · ".join(one_line(part) for part in parts if part), style="dim")


def reward_text(reward: Reward, detail: RolloutDetail, standings: RewardStandings) -> Text:
    """Struck through where a later one revises it, unless training has used it."""
    value = "taken back" if reward.value is None else format_number(reward.value)
    text = Text.assemble((value, "bold"))
    if reward.name != "reward":
        text.append(f" {one_line(reward.name)}")
    text.append(f"  from {one_line(reward.source)}", style="dim")
    if reward.label:
        text.append(f" ({one_line(reward.label)})", style="dim")
    if reward.comment:
        text.append(f"  “{one_line(reward.comment)[:_LONGEST_COMMENT]}”", style="dim")
    if detail.came_late(reward):
        text.append(f"  came {late_by(detail)}: not used", style="yellow")
    if standings.is_latest(reward):
        return text
    if standings.is_latest(reward, in_time=True):
        return text.append("  training took this one", style="dim")
    text.stylize("strike")
    return text.append("  revised", style="not strike dim")


def _tools(index: int, how: TurnView) -> Iterator[Text]:
    """What the model was offered."""
    if tools := how.transcript.tools(index):
        names = ", ".join(one_line(name) for name in tools)
        yield from _row("tools", _clipped(names, "system", full=how.full), how, style="dim")


def _reply(index: int, how: TurnView) -> Iterator[Text]:
    reply = how.transcript.reply(index)
    if reply is not None:
        yield from _message(reply, how)


def _message(message: Message, how: TurnView) -> Iterator[Text]:
    role = one_line(message.role)
    style = _ROLE_STYLE.get(message.role, "")
    if message.reasoning:
        thought = _clipped(message.reasoning, message.role, full=how.full)
        thought.stylize("dim italic")
        yield from _row(role, thought, how, style=style)
        role = ""
    if message.text or not (message.calls or message.reasoning):
        body = _clipped(message.text, message.role, full=how.full)
        if message.role in ("system", "developer"):
            body.stylize("dim")
        if not message.text:
            body = Text("(empty)", style="dim")
        if message.answers:
            named = (f"← {one_line(message.answers)}", "magenta")
            body = Text.assemble(named, "\n" if "\n" in body.plain else " ", body)
        yield from _row(role, body, how, style=style)
        role = ""
    for call in message.calls:
        line = Text(f"→ {one_line(call.name)}", style="bold magenta")
        arguments = _clipped(f"({call.arguments})", message.role, full=how.full)
        arguments.stylize("not bold magenta")
        yield from _row(role, line.append_text(arguments), how, style=style)
        role = ""


def _clipped(text: str, role: str, *, full: bool) -> Text:
    lines, characters = _LIMITS_BY_ROLE.get(role, _DEFAULT_LIMITS)
    text = printable(text).rstrip()
    return Text(text if full else clip(text, lines=lines, characters=characters))


def _ids(index: int, how: TurnView) -> Iterator[Text]:
    turn = how.detail.turns[index]
    new = turn.prompt_token_ids[how.transcript.parent_tokens(index) :]
    shown = Text(" ".join(map(str, new)) or "none", style="dim")
    yield from _row(f"+{len(new)} ids", shown, how, style="dim")
    sampled = Text()
    for token, logprob in zip(turn.completion_token_ids, turn.completion_logprobs, strict=True):
        sampled.append(f"{token}").append(f":{logprob:.2f} ", style=_surprise(logprob))
    yield from _row("sampled", sampled, how, style="dim")


def _surprise(logprob: float) -> str:
    return "red" if logprob < -3 else "yellow" if logprob < -1 else "dim"


def _span_name(turn: Turn, detail: RolloutDetail) -> str:
    named = [span.name for span in detail.spans if span.span_id == turn.parent_span_id]
    return one_line(f"{turn.parent_span_id} {' '.join(named)}")


def _row(label: str, body: Text, how: TurnView, *, style: str = "dim") -> Iterator[Text]:
    return hanging(Text(label, style=style), body, column=COLUMN, width=how.width, margin=_MARGIN)
