"""A real HTTP server on loopback stands in for the proxy: it keeps what it is sent."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import tracegrad

COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "four"},
        }
    ],
}


@dataclass
class Call:
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes


@dataclass
class FakeProxy:
    url: str
    calls: list[Call] = field(default_factory=list)
    # path -> statuses to answer with next; 200 when there are none left
    statuses: dict[str, list[int]] = field(default_factory=dict)
    refuse: str | None = None  # a batch that holds this text is answered 422
    # What becomes of every request: "ok", "hang" (no answer until it changes), "reset", or a status
    mode: str | int = "ok"
    answer: bytes = b"{}"  # to what is no completion

    def sent_to(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path]

    @property
    def chats(self) -> list[Call]:
        return [call for call in self.calls if call.path.endswith("/chat/completions")]

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The events taken so far, after a flush, in the order of arrival."""
        assert tracegrad.flush(60)
        taken = [
            event
            for call in self.sent_to("/api/events")
            for event in json.loads(call.body)["events"]
        ]
        return [event for event in taken if kind in (None, event["type"])]

    def ends(self) -> list[tuple[str, str | None]]:
        return [(e["outcome"], e["error"]) for e in self.events("rollout_finished")]

    def rewards(self) -> list[tuple[float, str, int | None]]:
        return [(e["value"], e["name"], e["turn"]) for e in self.events("reward")]

    def spans(self) -> list[Any]:
        assert tracegrad.flush(60)
        return [
            span
            for call in self.sent_to("/v1/traces")
            for resource in ExportTraceServiceRequest.FromString(call.body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FakeProxy

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        body = self.rfile.read(length)
        if len(body) < length:  # its sender was killed meanwhile: no request
            self.close_connection = True
            return
        while self.proxy.mode == "hang":
            time.sleep(0.02)
        if self.proxy.mode == "reset":
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        if isinstance(self.proxy.mode, int):
            self.proxy.statuses[self.path] = [self.proxy.mode]
        status = (self.proxy.statuses.get(self.path) or [200]).pop(0)
        if self.proxy.refuse is not None and self.proxy.refuse.encode() in body:
            status = 422
        if status == 200:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.proxy.calls.append(Call(self.path, headers, body))
        completes = "completions" in self.path
        answer = json.dumps(COMPLETION).encode() if completes else self.proxy.answer
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        with suppress(OSError):
            self.end_headers()
            self.wfile.write(answer)

    def finish(self) -> None:
        with suppress(OSError):  # of a client that waits no longer
            super().finish()

    def log_message(self, *args: object) -> None:
        """Quiet."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


def serve(port: int = 0) -> tuple[FakeProxy, _Server]:
    handler = type("Handler", (_Handler,), {})
    server = _Server(("127.0.0.1", port), handler)
    handler.proxy = FakeProxy(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return handler.proxy, server
