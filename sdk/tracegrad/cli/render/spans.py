"""A rollout's spans: under their parents, with the turns that they made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from tracegrad import genai_attributes
from tracegrad.cli.render.console import wrapped
from tracegrad.events import Span
from tracegrad.inspect.display_text import clip, format_ranges, one_line, printable
from tracegrad.inspect.tree_layout import shorten_guide, with_guides
from tracegrad.jsonutil import text_or_json
from tracegrad.store import RolloutDetail
from tracegrad.text_format import format_count, format_duration

_MARGIN = 2
_WIDE = 200
# What instrumentation libraries put a tool's or a chain's input and output under.
_INPUT = (genai_attributes.TOOL_ARGUMENTS, "input.value", "traceloop.entity.input")
_OUTPUT = (genai_attributes.TOOL_RESULT, "output.value", "traceloop.entity.output")
_KIND = ("openinference.span.kind", "traceloop.span.kind", genai_attributes.OPERATION)
_MODEL = (genai_attributes.RESPONSE_MODEL, genai_attributes.REQUEST_MODEL, "llm.model_name")
_TOKENS_IN = (*genai_attributes.INPUT_TOKENS, "llm.token_count.prompt")
_TOKENS_OUT = (*genai_attributes.OUTPUT_TOKENS, "llm.token_count.completion")
_ERROR = ("otel.status_description", "exception.message", "error.type")


def render_spans(detail: RolloutDetail, width: int | None, *, full: bool) -> Iterator[Text]:
    start = min(span.start_ns for span in detail.spans)
    calls: dict[str, list[int]] = {}
    for index, turn in enumerate(detail.turns):
        calls.setdefault(turn.parent_span_id or "", []).append(index)
    for span, *guides in _placed(detail.spans):
        guide, under = (shorten_guide(each, (width or _WIDE) // 2) for each in guides)
        made = calls.get(span.span_id, [])
        line = Text.assemble((guide, "dim"), _line(span, start, made))
        yield _cut(line, width)
        # Prompt and reply of a model are shown with its turn.
        for text in () if made else _texts(span, full=full):
            room = None if width is None else width - _MARGIN - len(under)
            for part in wrapped(text, room):
                yield Text.assemble((" " * _MARGIN + under, "dim"), part)


def _cut(line: Text, width: int | None) -> Text:
    whole = Text(" " * _MARGIN).append_text(line)
    if width is not None:
        whole.truncate(width, overflow="ellipsis")
    return whole


def _placed(spans: Sequence[Span]) -> Iterator[tuple[Span, str, str]]:
    """Every span once, with what leads to it and the prefix of its further lines."""
    known = {span.span_id for span in spans}
    children: dict[str | None, list[Span]] = {}
    for span in spans:
        parent = span.parent_span_id if span.parent_span_id in known else None
        children.setdefault(parent, []).append(span)
    shown: set[str] = set()
    waiting = [(span, "", "") for span in reversed(children.get(None, []))]
    while waiting or len(shown) < len(known):
        if not waiting:  # spans that are each other's parents: a broken trace
            waiting.append((next(span for span in spans if span.span_id not in shown), "", ""))
        span, guide, under = waiting.pop()
        if span.span_id in shown:
            continue
        shown.add(span.span_id)
        below = children.get(span.span_id, [])
        yield span, guide, under + ("│  " if below else "   ")
        waiting += reversed(with_guides(below, under))


def _line(span: Span, start: int, turns: Sequence[int]) -> Text:
    failed = span.status == "error"
    line = Text.assemble((one_line(span.name), "red" if failed else ""))
    took = format_duration((span.end_ns - span.start_ns) / 1e9)
    line.append(f"  {took} at +{format_duration((span.start_ns - start) / 1e9)}", style="dim")
    if failed:
        why = _first(span.attributes, _ERROR)
        reason = f": {one_line(text_or_json(why))}" if why is not None else ""
        line.append(f"  error{reason}", style="red")
    if turns:
        line.append(
            f"  {'turn' if len(turns) == 1 else 'turns'} {format_ranges(turns)}", style="cyan"
        )
    parts = [
        text_or_json(event)
        for names in (_KIND, _MODEL)
        if (event := _first(span.attributes, names))
    ]
    tokens = [_first(span.attributes, names) for names in (_TOKENS_IN, _TOKENS_OUT)]
    if not turns and any(isinstance(each, int) for each in tokens):
        parts.append(f"{tokens[0] or 0:,} prompt + {format_count(int(tokens[1] or 0), 'token')}")
    if parts:
        line.append("  " + one_line(" · ".join(parts)), style="dim")
    return line


def _texts(span: Span, *, full: bool) -> Iterator[Text]:
    for mark, names in (("→ ", _INPUT), ("← ", _OUTPUT)):
        found = _first(span.attributes, names)
        if found not in (None, ""):
            text = printable(text_or_json(found))
            yield Text(mark + (text if full else clip(text, lines=3, characters=240)), style="dim")


def _first(attributes: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((attributes[name] for name in names if attributes.get(name) is not None), None)
