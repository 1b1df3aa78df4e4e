"""The teacher: a chat completions API on loopback whose answers are written by rules.

It stands in the place of a hosted model. It looks up what is asked for, multiplies what it found,
and answers; where a question falls on the unlucky side of a hash it makes the careless colleague's
mistake. That depends on the question alone: the same one is answered the same way every time.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from examples.shop.tasks import PHRASINGS, Kind

Message = dict[str, Any]

SLIPS = 0.2  # share of questions with a mistake
LOOKUPS: dict[Kind, tuple[str, str]] = {  # the right tool, and the careless one
    "stock": ("stock", "forecast"),
    "price": ("price", "list_price"),
    "total": ("price", "list_price"),
}


def _pattern(phrasing: str) -> re.Pattern[str]:
    marked = re.escape(phrasing.format(item="ITEM", city="CITY", quantity="QUANTITY"))
    for name, shape in (("item", r"\w+?"), ("city", r"\w+"), ("quantity", r"\d+")):
        marked = marked.replace(name.upper(), f"(?P<{name}>{shape})")
    return re.compile(marked)


# A total before a price: "Name the price of 3 lamps" is not of an item that is called "3 lamps".
_PATTERNS: list[tuple[Kind, re.Pattern[str]]] = [
    (kind, _pattern(phrasing))
    for kind in ("total", "stock", "price")
    for phrasing in PHRASINGS[kind]
]


def slips(question: str) -> bool:
    """Whether this question is answered with a mistake."""
    return hashlib.sha256(question.encode()).digest()[0] / 256 < SLIPS


def reply(messages: Sequence[Message]) -> Message:
    """The assistant's next message. Raises ValueError for a question that the shop does not
    know."""
    question = str(messages[0]["content"])
    asked = ((kind, pattern.fullmatch(question)) for kind, pattern in _PATTERNS)
    known = next(((kind, found) for kind, found in asked if found), None)
    if known is None:
        raise ValueError(f"messages: the teacher knows nothing of {question!r}")
    kind, found = known
    results = [str(message["content"]) for message in messages if message["role"] == "tool"]
    if not results:
        lookup = LOOKUPS[kind][slips(question)]
        return _call(lookup, {"item": found["item"], "city": found["city"]}, turn=0)
    if kind == "total" and len(results) == 1:
        return _call("multiply", {"a": int(found["quantity"]), "b": int(results[0])}, turn=1)
    return {"role": "assistant", "content": results[-1]}


def _call(name: str, arguments: dict[str, Any], turn: int) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call_{turn}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def completion(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request for a chat completion."""
    message = reply(request["messages"])
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": "chatcmpl-teacher",
        "object": "chat.completion",
        "created": 0,
        "model": request.get("model", "teacher"),
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            status, answer = 200, completion(json.loads(body))
        except (LookupError, TypeError, ValueError) as error:
            status, answer = 400, {"error": {"message": str(error)}}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the screen belongs to the example."""


@contextmanager
def answering() -> Iterator[str]:
    """The teacher's base URL, up to `/v1`, while it answers; on loopback only."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
