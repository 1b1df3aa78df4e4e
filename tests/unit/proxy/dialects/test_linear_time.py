"""Requests of many small things take the time of their number, and not of its square."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson
import pytest

from tracegrad.chat.call import Call
from tracegrad.proxy.dialects.gemini.request import GeminiDialect
from tracegrad.proxy.dialects.openai_responses.request import OpenAIResponsesDialect

Json = dict[str, Any]


def gemini(body: Json) -> Call:
    return GeminiDialect().parse(
        orjson.dumps(body), {"model": "m", "method": "generateContent"}, {}
    )


def responses(body: Json) -> Call:
    return OpenAIResponsesDialect().parse(orjson.dumps(body), {}, {})


def unanswered(count: int) -> Json:
    calls = [{"functionCall": {"name": "a", "id": str(number)}} for number in range(count)]
    answers = [{"functionResponse": {"name": "b", "id": "other"}}] * count
    return {"contents": [{"role": "model", "parts": calls}, {"role": "user", "parts": answers}]}


def answered_by_name(count: int) -> Json:
    calls = [{"functionCall": {"name": name}} for name in "a" * count + "b" * count]
    answers = [{"functionResponse": {"name": "b"}}] * count
    return {"contents": [{"role": "model", "parts": calls}, {"role": "user", "parts": answers}]}


def allowed(count: int) -> Json:
    tools = [{"type": "function", "name": f"t{number}"} for number in range(count)]
    return {
        "input": "a",
        "tools": [{"type": "namespace", "name": "space", "tools": tools}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": tools},
    }


SHAPES: Mapping[str, tuple[Callable[[Json], Call], Callable[[int], Json]]] = {
    "calls and answers of others": (gemini, unanswered),
    "calls and answers by name": (gemini, answered_by_name),
    "allowed tools of a namespace": (responses, allowed),
}
FEW, TIMES = 250, 16


def taken(parse: Callable[[Json], Call], body: Json) -> float:
    """Processor time of this thread, the least of some."""
    found = []
    for _ in range(3):
        start = time.thread_time()
        parse(body)
        found.append(time.thread_time() - start)
    return min(found)


@pytest.mark.parametrize("name", SHAPES)
def test_sixteen_times_as_much_takes_sixteen_times_as_long(name: str) -> None:
    """A square would be 256 times as long; half-way, by their ratio, lies what is refused here."""
    parse, shape = SHAPES[name]
    assert taken(parse, shape(FEW * TIMES)) < 64 * taken(parse, shape(FEW))


def test_answers_find_their_calls() -> None:
    """By id, else the first of that name that has none; each call once."""
    names = ["a", "b", "a", "b"]
    calls = [{"functionCall": {"name": name, "id": f"{name}{n}"}} for n, name in enumerate(names)]
    reported = [{"name": "b", "id": "b1"}, {"name": "a"}, {}, {"name": "b"}]
    answers = [{"functionResponse": each} for each in reported]
    body = {"contents": [{"role": "model", "parts": calls}, {"role": "user", "parts": answers}]}
    messages = gemini(body).messages[1:]
    assert [message["tool_call_id"] for message in messages] == ["b1", "a0", "a2", "b3"]
