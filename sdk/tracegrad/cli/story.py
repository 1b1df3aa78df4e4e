"""`tracegrad rollouts show`: one rollout as a person reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tracegrad.cli.messages import Message, news_of, reply_of
from tracegrad.cli.words import (
    OUTCOME_STYLE,
    clip,
    clock,
    count,
    duration,
    number,
    printable,
    tag_text,
    training_text,
)
from tracegrad.records import RewardGiven, SpanEnded, Turn
from tracegrad.store import RolloutDetail, TurnFate
from tracegrad.store.packing import dump_json

_ROLE_STYLE = {"system": "dim", "user": "bold", "tool": "yellow", "reply": "green"}


def tell(detail: RolloutDetail, *, tokens: bool, full: bool) -> Iterator[RenderableType]:
    yield _header(detail)
    for index, turn in enumerate(detail.turns):
        yield Text()
        yield Rule(_turn_title(index, turn, detail.turns), align="left", style="dim")
        yield Padding(_turn_facts(turn, detail), (0, 0, 0, 2))
        yield Padding(_conversation(index, detail.turns, full=full), (0, 0, 0, 2))
        if tokens:
            yield Padding(_tokens(turn, detail.turns), (0, 0, 0, 2))
    if detail.spans:
        yield Text()
        yield Rule("spans", align="left", style="dim")
        yield Padding(_span_tree(detail), (0, 0, 0, 2))


def _two_columns() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=7)
    table.add_column(overflow="fold")
    return table


def _header(detail: RolloutDetail) -> Table:
    row = detail.row
    table = _two_columns()
    table.add_row(Text("rollout", style="dim"), Text(row.rollout_id, style="bold cyan"))
    table.add_row(Text("task", style="dim"), Text(printable(row.task_id or "untitled")))
    if detail.task is not None:
        asked = detail.task if isinstance(detail.task, str) else dump_json(detail.task)
        table.add_row(Text("asked", style="dim"), _clipped(asked, full=False))
    if row.agent:
        table.add_row(Text("agent", style="dim"), Text(printable(row.agent)))
    if row.tags:
        table.add_row(Text("tags", style="dim"), Text(tag_text(row.tags)))
    table.add_row(Text("outcome", style="dim"), _outcome(detail))
    if row.error:
        table.add_row(Text("error", style="dim"), Text(printable(row.error), style="red"))
    for reward in detail.rewards:
        table.add_row(Text("reward", style="dim"), _reward(reward, detail))
    table.add_row(Text("training", style="dim"), Text(_training(detail)))
    return table


def _outcome(detail: RolloutDetail) -> Text:
    row = detail.row
    text = Text()
    if row.outcome is None or row.finished_at is None:
        text.append("open", style="blue").append(f" since {clock(row.opened_at)}")
        return text
    text.append(row.outcome.value, style=OUTCOME_STYLE[row.outcome])
    took = duration(max(0.0, row.finished_at - row.opened_at))
    return text.append(f" in {took}, opened {clock(row.opened_at)}")


def _reward(reward: RewardGiven, detail: RolloutDetail) -> Text:
    text = Text(number(reward.value), style="bold")
    if reward.name != "reward":
        text.append(f" {printable(reward.name)}", style="not bold")
    if reward.turn is not None:
        index = reward.turn if reward.turn >= 0 else len(detail.turns) + reward.turn
        text.append(f" for turn {index}", style="not bold")
    text.append(f"  from {printable(reward.source)}", style="not bold dim")
    same = [r for r in detail.rewards if (r.name, r.turn) == (reward.name, reward.turn)]
    # The last of equals in arrival, as the ledger has it.
    if max(reversed(same), key=lambda r: r.created_at) is not reward:
        text.stylize("strike")
        text.append("  revised", style="not strike dim")
    return text


def _training(detail: RolloutDetail) -> str:
    row = detail.row
    reasons = Counter(fate.skip_reason for fate in detail.fates.values() if fate.skip_reason)
    why = ", ".join(f"{amount} not: {printable(reason)}" for reason, amount in reasons.items())
    if row.trained_turns:
        turns = f"{row.trained_turns} of {count(row.turns, 'turn')}"
        return f"{turns} trained in step {row.consumed_step}" + (f", {why}" if why else "")
    return training_text(row) + (f" ({', '.join(map(printable, reasons))})" if reasons else "")


def _turn_title(index: int, turn: Turn, turns: Sequence[Turn]) -> Text:
    title = Text(f"turn {index}", style="bold")
    number_of = {t.turn_id: i for i, t in enumerate(turns)}
    if turn.parent_id is not None and number_of.get(turn.parent_id) != index - 1:
        title.append(f"  continues turn {number_of.get(turn.parent_id, '?')}", style="not bold")
    elif turn.parent_id is None and index > 0:
        title.append("  starts afresh", style="not bold")
    if turn.fork_reason:
        title.append(f"  fork: {printable(turn.fork_reason)}", style="not bold yellow")
    return title


def _turn_facts(turn: Turn, detail: RolloutDetail) -> Text:
    sampled = len(turn.completion_token_ids)
    parts = [
        f"{len(turn.prompt_token_ids):,} prompt + {count(sampled, 'token')}",
        _versions(turn),
    ]
    if sampled:
        parts.append(f"mean logprob {sum(turn.completion_logprobs) / sampled:.3f}")
    if turn.finish_reason:
        parts.append(turn.finish_reason)
    text = Text(" · ".join(printable(part) for part in parts if part), style="dim")
    fate, style = _fate(turn, detail.fates.get(turn.turn_id), detail)
    return text.append(" · ").append(fate, style=style)


def _versions(turn: Turn) -> str:
    spans = [(version, amount) for version, amount in turn.policy_versions if amount]
    if len(spans) == 1:
        return f"version {spans[0][0]}"
    return ", ".join(f"{amount} by version {version}" for version, amount in spans)


def _fate(turn: Turn, fate: TurnFate | None, detail: RolloutDetail) -> tuple[str, str]:
    if fate is not None and fate.step is not None:
        return f"trained in step {fate.step}", "not dim green"
    if fate is not None:
        return f"not trained: {printable(fate.skip_reason or '')}", "not dim yellow"
    if turn.untrainable:
        return f"not trainable: {printable(turn.untrainable)}", "not dim yellow"
    if detail.row.state == "consumed":
        return "not trained: late", "not dim yellow"
    return f"not trained yet: {training_text(detail.row)}", "not dim"


def _conversation(index: int, turns: Sequence[Turn], *, full: bool) -> Table:
    table = _two_columns()
    news = news_of(index, turns)
    if news.known and news.of_turn is not None:
        elided = f"… {count(news.known, 'message')} as in turn {news.of_turn}"
        table.add_row(Text(), Text(elided, style="dim italic"))
    for message in news.messages:
        _add_message(table, message, full=full)
    reply = reply_of(turns[index])
    if reply is not None:
        _add_message(table, reply, full=full)
    return table


def _add_message(table: Table, message: Message, *, full: bool) -> None:
    style = _ROLE_STYLE.get(message.role, "")
    role = Text(printable(message.role), style=style)
    if message.reasoning:
        thought = _clipped(message.reasoning, full=full)
        thought.stylize("dim italic")
        table.add_row(role, thought)
        role = Text()
    if message.text or not (message.calls or message.reasoning):
        body = _clipped(message.text, full=full) if message.text else Text("(empty)", style="dim")
        if message.role == "system":
            body.stylize("dim")
        table.add_row(role, body)
        role = Text()
    for call in message.calls:
        line = Text().append(f"→ {printable(call.name)}", style="bold magenta")
        table.add_row(role, line.append_text(_clipped(f"({call.arguments})", full=full)))
        role = Text()


def _clipped(text: str, *, full: bool) -> Text:
    text = printable(text)
    return Text(text if full else clip(text, lines=16, characters=1200))


def _tokens(turn: Turn, turns: Sequence[Turn]) -> Table:
    parent = next((t for t in turns if t.turn_id == turn.parent_id), None)
    known = len(parent.prompt_token_ids) + len(parent.completion_token_ids) if parent else 0
    new = turn.prompt_token_ids[known:]
    table = _two_columns()
    table.add_row(
        Text(f"+{len(new)} ids", style="dim"), Text(" ".join(map(str, new)) or "none", style="dim")
    )
    sampled = Text()
    for token, logprob in zip(turn.completion_token_ids, turn.completion_logprobs, strict=True):
        sampled.append(f"{token}").append(f":{logprob:.2f} ", style=_surprise(logprob))
    table.add_row(Text("sampled", style="dim"), sampled)
    return table


def _surprise(logprob: float) -> str:
    return "red" if logprob < -3 else "yellow" if logprob < -1 else "dim"


def _span_tree(detail: RolloutDetail) -> Tree:
    """Spans under their parents, the turns under the spans that made them."""
    start = min(span.start_ns for span in detail.spans)
    tree = Tree(Text("rollout", style="dim"), guide_style="dim", hide_root=True)
    known = {span.span_id for span in detail.spans}
    children: dict[str | None, list[SpanEnded]] = {}
    for span in detail.spans:
        parent = span.parent_span_id if span.parent_span_id in known else None
        children.setdefault(parent, []).append(span)
    calls: dict[str, list[int]] = {}
    for index, turn in enumerate(detail.turns):
        calls.setdefault(turn.parent_span_id or "", []).append(index)
    waiting = [(tree, span) for span in reversed(children.get(None, []))]
    while waiting:
        under, span = waiting.pop()
        branch = under.add(_span_line(span, start, calls.get(span.span_id, [])))
        waiting += [(branch, child) for child in reversed(children.get(span.span_id, []))]
    return tree


def _span_line(span: SpanEnded, start: int, turns: Sequence[int]) -> Text:
    line = Text(printable(span.name), style="red" if span.status == "error" else "")
    took = duration((span.end_ns - span.start_ns) / 1e9)
    line.append(f"  {took} at +{duration((span.start_ns - start) / 1e9)}", style="dim")
    if span.status == "error":
        line.append("  error", style="red")
    if turns:
        line.append(f"  turn {', '.join(map(str, turns))}", style="cyan")
    return line
