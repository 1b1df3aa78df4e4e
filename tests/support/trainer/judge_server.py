"""A small HTTP server that judges groups of attempts."""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer:
    """Answers with what `answers` has, (status, text of the reply or body, headers); then scores
    each attempt by the number in its text, over ten."""

    def __init__(self) -> None:
        self.answers: deque[tuple[int, str, dict[str, str]]] = deque()
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""

    def answer(self, body: dict[str, Any]) -> tuple[int, str, dict[str, str]]:
        if self.answers:
            return self.answers.popleft()
        digits = re.findall(r"I say (\d)", body["messages"][1]["content"])
        return (
            200,
            f"<think>{{}}</think>{json.dumps({'scores': [int(d) / 10 for d in digits]})}",
            {},
        )


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    """It listens, and has its `url`."""
    made = JudgeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            made.requests.append({**body, "path": self.path})
            made.keys.append(self.headers.get("authorization"))
            status, text, headers = made.answer(body)
            message = {"choices": [{"message": {"role": "assistant", "content": text}}]}
            said = json.dumps(message if status == 200 else {"error": text}).encode()
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(said))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        made.url = f"http://127.0.0.1:{http.server_port}/v1"
        thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield made
        http.shutdown()
        thread.join()
