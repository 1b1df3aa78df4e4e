"""One turn as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from tracegrad.cli.render.console import hanging, indented, rule
from tracegrad.cli.render.format import (
    clip,
    clock,
    count,
    duration,
    ending,
    number,
    one_line,
    printable,
    training_text,
)
from tracegrad.events import RewardGiven, Turn
from tracegrad.inspect.forks import instead_of
from tracegrad.inspect.reasons import fork_words, training_words, untrained
from tracegrad.inspect.transcript import Conversations, Known, Message
from tracegrad.store import RolloutDetail
from tracegrad.store.encoding.blobs import dump_json
from tracegrad.store.read.training_samples import known_to_agent

COLUMN = 11
_MARGIN = 2
_ROLE_STYLE = {"system": "dim", "developer": "dim", "user": "bold", "tool": "yellow",
               "reply": "green", "assistant": "green"}  # fmt: skip
# Lines and characters of a message; the model's own words and the user's are what one reads for.
_ROOM = {"system": (4, 400), "developer": (4, 400), "tool": (8, 800)}
_MUCH = (16, 1200)


@dataclass(frozen=True, slots=True)
class Telling:
    """How much: whole messages (`full`), token ids (`tokens`)."""

    detail: RolloutDetail
    talk: Conversations
    width: int | None
    full: bool = False
    tokens: bool = False


def tell_turn(index: int, how: Telling) -> Iterator[Text]:
    """What is new in it: messages that an earlier turn had are only counted."""
    yield from _about(index, how)
    if index == 0 or how.talk.tools(index) != how.talk.tools(index - 1):
        yield from _tools(index, how)
    for news in how.talk.news(index):
        if isinstance(news, Known):
            elided = f"… {count(news.messages, 'message')} as in turn {news.of_turn}"
            yield from _row("", Text(elided, style="dim italic"), how)
        else:
            yield from _message(news, how)
    yield from _reply(index, how)
    if how.tokens:
        yield from _ids(index, how)


def tell_whole_turn(index: int, how: Telling) -> Iterator[Text]:
    """All that is recorded of it, every message in full."""
    turn = how.detail.turns[index]
    yield from _about(index, how)
    yield from _row("id", Text(one_line(turn.turn_id)), how)
    yield from _row("made", Text(f"{clock(turn.created_at)} in {turn.dialect}"), how)
    yield from _row("model", Text(one_line(turn.model)), how)
    if turn.sampling:
        settings = (f"{name}={_value(value)}" for name, value in turn.sampling.items())
        yield from _row("sampling", Text(one_line(" ".join(settings))), how)
    versions = ", ".join(f"{count(n, 'token')} by {v}" for v, n in turn.policy_versions)
    if versions:
        yield from _row("versions", Text(versions), how)
    if turn.parent_span_id is not None:
        yield from _row("span", Text(_span_name(turn, how.detail)), how)
    yield from _tools(index, how)
    for message in how.talk.messages(index):
        yield from _message(message, how)
    yield from _reply(index, how)
    if turn.request is None:
        yield from _row("", Text("the request was not kept", style="dim italic"), how)
    if how.tokens:
        yield from _ids(index, how)


def _about(index: int, how: Telling) -> Iterator[Text]:
    turn = how.detail.turns[index]
    yield rule(turn_title(index, how.detail), how.width)
    yield from indented(_facts(turn, how.detail), margin=_MARGIN, width=how.width)
    if turn.fork_reason:
        rival = instead_of(index, how.talk)
        instead = f", instead of continuing turn {rival}" if rival is not None else ""
        why = f"{one_line(turn.fork_reason)}{instead}: {fork_words(turn.fork_reason).meaning}"
        yield from _row("fork", Text(why, style="yellow"), how)
    missing = untrained(turn, how.detail.fates.get(turn.turn_id), how.detail.row)
    if missing is not None and missing.final:
        why = f"{one_line(missing.reason)}: {training_words(missing.reason).meaning}"
        yield from _row("untrained", Text(why, style="yellow"), how)
    for reward in rewards_for(index, how.detail):
        yield from _row("reward", reward_text(reward, how.detail), how)


def turn_title(index: int, detail: RolloutDetail) -> Text:
    turns = detail.turns
    turn = turns[index]
    title = Text(f"turn {index}", style="bold")
    number_of = {t.turn_id: i for i, t in enumerate(turns)}
    if turn.parent_id is not None and number_of.get(turn.parent_id) != index - 1:
        title.append(f"  continues turn {number_of.get(turn.parent_id, '?')}", style="not bold")
    elif turn.parent_id is None and index > 0:
        title.append("  starts afresh", style="not bold")
    fate, style = fate_text(turn, detail)
    return title.append("  ").append(fate, style=f"not bold {style}")


def _facts(turn: Turn, detail: RolloutDetail) -> Text:
    sampled = len(turn.completion_token_ids)
    parts = [f"+{duration(max(0.0, turn.created_at - detail.row.opened_at))}"]
    if sampled or turn.prompt_token_ids:
        parts.append(f"{len(turn.prompt_token_ids):,} prompt + {count(sampled, 'token')}")
    else:
        parts.append("no tokens")
    parts.append(versions_text(turn))
    if sampled:
        parts.append(f"logprob {sum(turn.completion_logprobs) / sampled:.3f}")
    parts.append(ending(turn))
    return Text(" · ".join(one_line(part) for part in parts if part), style="dim")


def versions_text(turn: Turn) -> str:
    spans = [(version, amount) for version, amount in turn.policy_versions if amount]
    if len(spans) == 1:
        return f"version {spans[0][0]}"
    return ", ".join(f"{amount} by version {version}" for version, amount in spans)


def fate_text(turn: Turn, detail: RolloutDetail) -> tuple[str, str]:
    """What became of the turn, and a style."""
    fate = detail.fates.get(turn.turn_id)
    missing = untrained(turn, fate, detail.row)
    if missing is None:
        return f"trained in step {fate.step if fate else None}", "green"
    if not missing.final:
        return f"not trained yet: {training_text(detail.row)}", ""
    how = "not trained" if fate is not None or not turn.untrainable else "not trainable"
    return f"{how}: {one_line(missing.reason)}", "yellow"


def rewards_for(index: int, detail: RolloutDetail) -> list[RewardGiven]:
    """Given for this turn, in order of arrival."""
    known = known_to_agent(detail.turns)
    return [r for r in detail.rewards if _turn_of(r, known) == index]


def _turn_of(reward: RewardGiven, known: Sequence[int]) -> int | None:
    """The index of the turn that it is for; None: it is for none, or for one that is not there."""
    if reward.turn is None or not -len(known) <= reward.turn < len(known):
        return None
    return known[reward.turn]


def reward_text(reward: RewardGiven, detail: RolloutDetail) -> Text:
    """Struck through where a later one revises it."""
    text = Text.assemble((number(reward.value), "bold"))
    if reward.name != "reward":
        text.append(f" {one_line(reward.name)}")
    text.append(f"  from {one_line(reward.source)}", style="dim")
    if reward.label:
        text.append(f" ({one_line(reward.label)})", style="dim")
    if not is_latest(reward, detail):
        text.stylize("strike")
        text.append("  revised", style="not strike dim")
    return text


def is_latest(reward: RewardGiven, detail: RolloutDetail) -> bool:
    turns = len(known_to_agent(detail.turns))

    def given_for(each: RewardGiven) -> tuple[str, int | None]:
        behind = each.turn is not None and each.turn < 0
        return each.name, each.turn + turns if behind and each.turn is not None else each.turn

    # The last in arrival, as the ledger has it.
    return [each for each in detail.rewards if given_for(each) == given_for(reward)][-1] is reward


def _tools(index: int, how: Telling) -> Iterator[Text]:
    """What the model was offered."""
    if tools := how.talk.tools(index):
        names = ", ".join(one_line(name) for name in tools)
        yield from _row("tools", _clipped(names, "system", full=how.full), how, style="dim")


def _reply(index: int, how: Telling) -> Iterator[Text]:
    reply = how.talk.reply(index)
    if reply is not None:
        yield from _message(reply, how)


def _message(message: Message, how: Telling) -> Iterator[Text]:
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
    lines, characters = _ROOM.get(role, _MUCH)
    text = printable(text).rstrip()
    return Text(text if full else clip(text, lines=lines, characters=characters))


def _ids(index: int, how: Telling) -> Iterator[Text]:
    turn = how.detail.turns[index]
    new = turn.prompt_token_ids[known_tokens(turn, how.detail.turns) :]
    shown = Text(" ".join(map(str, new)) or "none", style="dim")
    yield from _row(f"+{len(new)} ids", shown, how, style="dim")
    sampled = Text()
    for token, logprob in zip(turn.completion_token_ids, turn.completion_logprobs, strict=True):
        sampled.append(f"{token}").append(f":{logprob:.2f} ", style=_surprise(logprob))
    yield from _row("sampled", sampled, how, style="dim")


def known_tokens(turn: Turn, turns: Sequence[Turn]) -> int:
    """How many of its prompt's tokens its parent has."""
    parent = next((t for t in turns if t.turn_id == turn.parent_id), None)
    return len(parent.prompt_token_ids) + len(parent.completion_token_ids) if parent else 0


def _surprise(logprob: float) -> str:
    return "red" if logprob < -3 else "yellow" if logprob < -1 else "dim"


def _span_name(turn: Turn, detail: RolloutDetail) -> str:
    named = [span.name for span in detail.spans if span.span_id == turn.parent_span_id]
    return one_line(f"{turn.parent_span_id} {' '.join(named)}")


def _value(value: object) -> str:
    return value if isinstance(value, str) else dump_json(value)


def _row(label: str, body: Text, how: Telling, *, style: str = "dim") -> Iterator[Text]:
    return hanging(Text(label, style=style), body, column=COLUMN, width=how.width, margin=_MARGIN)
