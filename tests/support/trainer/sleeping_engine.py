"""vLLM's push and sleep routes and the proxy's gate on one port, with the states behind them.

The states move as vLLM 0.32's do (`v1/engine/core.py`, `v1/executor/abstract.py`): an engine that
takes back its last memory resumes by itself, one that is only paused resumes on any wake, and a
level-2 sleep leaves nothing in the weights' memory. What must never happen is noted in `wrong`.
With `serves_adapters` an update brings an adapter, and what is beneath it no update brings back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from safetensors.torch import load_file

TAGS = frozenset({"weights", "kv_cache"})
MODEL_FOLDER = 0.5  # the one weight of version 0, or of none


class Refused(Exception):
    """What a handler answers with 500."""


@dataclass
class EngineState:
    """`weight`: the value of the one weight, None where its memory holds nothing of use."""

    weight: float | None = MODEL_FOLDER
    candidate: float | None = None  # of the candidate's name, where the proxy has one
    candidate_version: int = 0  # the proxy's
    host_copy: float | None = None
    has_base: bool = True  # what is beneath an adapter
    host_base: bool = False
    asleep: set[str] = field(default_factory=set)
    paused: bool = False
    updating: bool = False
    incoming: list[float] = field(default_factory=list)
    is_candidates: bool = False  # what is coming in
    says: str = "default"  # what it calls its weights
    away: bool = False  # the proxy sends no calls: it was started again
    version: int = 0  # the proxy's
    held: bool = False
    is_new: bool = False  # the proxy: it was started again, and knows no version


class SleepingEngine:
    """`refuse(number, path)`: whether the call of this number (from 0) is answered with 500; it
    has no effect then."""

    def __init__(self, port: int = 0) -> None:
        self.reset()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                status, answer = engine.answer(self.path, json.loads(body or "{}"))
                self.send_response(status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def reset(self) -> None:
        self.state = EngineState()
        self.serves_adapters = False
        self.calls: list[str] = []
        self.at: list[float] = []  # when each came
        self.bodies: list[dict[str, Any]] = []
        self.loaded: list[float] = []  # the weight in each update that was taken
        self.refuse: Callable[[int, str], bool] = lambda number, path: False
        self.wrong: list[str] = []
        self.weights = {0: MODEL_FOLDER, -1: MODEL_FOLDER}  # of each version
        self.fleet: dict[str, SleepingEngine] = {}  # of the proxy here, by URL; {}: this one alone
        self.all_may_be_held = not self.fleet
        self.canary: dict[str, Any] | None = None
        self.lock = Lock()

    def start_again(self) -> None:
        """As a supervisor does with an engine that was killed."""
        proxy = {"version": self.state.version, "held": self.state.held}
        self.state = EngineState(away=True, **proxy)

    def start_proxy_again(self, version: int) -> None:
        """`version`: what the store has as served."""
        self.state.version, self.state.held, self.state.is_new = version, True, True

    def refuse_once(self, call: str) -> None:
        left = [call]
        self.refuse = lambda number, path: path in left and left.remove(path) is None

    def sent(self, path: str) -> list[dict[str, Any]]:
        """The bodies of all calls of a path."""
        return [body for call, body in zip(self.calls, self.bodies, strict=True) if call == path]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, target: str, body: dict[str, Any]) -> tuple[int, bytes]:
        path, query = urlsplit(target).path, dict(parse_qsl(urlsplit(target).query))
        shown = path + "".join(f" {value}" for value in query.values())
        with self.lock:
            self.calls.append(shown)
            self.at.append(time.monotonic())
            self.bodies.append(body)
            try:
                if self.refuse(len(self.calls) - 1, shown):
                    raise Refused("not today")
                found = getattr(self, path.removeprefix("/").replace("/", "_"))(query, body)
            except Refused as error:
                return 500, json.dumps({"error": {"message": str(error)}}).encode()
            finally:
                for each in self.fleet.values() or [self]:
                    each.check(shown)
        return 200, json.dumps(found or {}).encode()

    def check(self, call: str) -> None:
        state = self.state
        if state.paused or state.away or state.held:
            return
        if state.asleep:
            self.wrong.append(f"{call}: computes without {state.asleep}")
        elif not state.has_base:
            self.wrong.append(f"{call}: computes an adapter over weights that are gone")
        elif state.weight != self.weights[state.version]:
            self.wrong.append(f"{call}: computes version {state.version} with {state.weight}")
        elif self.tries_by_name and state.candidate != self.weights[state.candidate_version]:
            found = f"version {state.candidate_version} with {state.candidate}"
            self.wrong.append(f"{call}: computes the candidate's {found}")

    @property
    def tries_by_name(self) -> bool:
        return self.canary is not None and "model" in self.canary

    @property
    def serves(self) -> bool:
        """Whether calls come, and are answered."""
        state = self.state
        return not (state.paused or state.held or state.asleep or state.updating or self.wrong)

    # vLLM

    def pause(self, query: dict[str, str], body: dict[str, Any]) -> None:
        assert query["mode"] == "keep", "abort would end running requests"
        assert query["clear_cache"] in ("true", "false")
        self.state.paused = True

    def resume(self, query: dict[str, str], body: dict[str, Any]) -> None:
        self.state.paused = False

    def sleep(self, query: dict[str, str], body: dict[str, Any]) -> None:
        state = self.state
        assert query["mode"] == "keep", "abort would end running requests"
        state.paused = True
        if "weights" in state.asleep:
            return
        state.host_copy = state.weight if query["level"] == "1" else None
        state.host_base = state.has_base and query["level"] == "1"
        state.weight, state.has_base = None, False
        state.asleep = set(TAGS)

    def wake_up(self, query: dict[str, str], body: dict[str, Any]) -> None:
        state, tag = self.state, query["tags"]
        if tag in state.asleep:
            state.asleep.remove(tag)
            if tag == "weights":
                state.weight, state.host_copy = state.host_copy, None
                state.has_base = state.host_base
        if not state.asleep:
            state.paused = False

    def start_weight_update(self, query: dict[str, str], body: dict[str, Any]) -> None:
        if self.state.updating:
            raise Refused("a weight update is already active")
        if "weights" in self.state.asleep:
            self.wrong.append("weights are loaded into memory that is not there")
        self.state.updating, self.state.incoming = True, []

    def update_weights(self, query: dict[str, str], body: dict[str, Any]) -> None:
        info = body["update_info"]
        paths = info["paths"]
        if not self.state.updating or not paths:
            self.state.updating = False
            raise Refused("paths: the update names no files")
        if "parts" not in info and not info.get("candidate"):  # in place of what is served
            self.state.weight = None
        self.state.is_candidates = info.get("candidate", False)
        self.state.incoming += [load_file(path)["w"].item() for path in paths]
        self.loaded += self.state.incoming[-len(paths) :]

    def finish_weight_update(self, query: dict[str, str], body: dict[str, Any]) -> None:
        if not self.state.paused:
            self.wrong.append("weights change while the engine computes")
        self.state.updating = False
        self.state.has_base |= not self.serves_adapters
        [self.state.candidate] = self.state.incoming  # any push is one of both names
        if not self.state.is_candidates:
            self.state.weight = self.state.candidate
        self.state.says, self.state.away = body["weight_version"], False

    def weight_info(self, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        return {"weight_version": self.state.says}

    # The proxy

    def _upstreams(self, body: dict[str, Any]) -> list[EngineState]:
        """Those that a request of the proxy's is about."""
        if (url := body.get("upstream")) is not None:
            return [self.fleet[url].state]
        return [each.state for each in self.fleet.values()] or [self.state]

    def api_push(self, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        said: dict[str, Any] = {"version": self.state.version, "held": self.state.held}
        if self.canary is not None and self.tries_by_name:
            said["canary"] = self.canary | {"version": self.state.candidate_version}
        apart = {
            url: {"version": each.state.version, "held": each.state.held}
            for url, each in self.fleet.items()
            if each.state.version != self.state.version
        }
        return {**said, "upstreams": apart} if apart else said

    api_push_upstreams = api_push

    def api_push_hold(self, query: dict[str, str], body: dict[str, Any]) -> None:
        for state in self._upstreams(body):
            state.held = True
        if not self.all_may_be_held and all(each.state.held for each in self.fleet.values()):
            self.wrong.append("nobody takes calls")

    def api_push_version(self, query: dict[str, str], body: dict[str, Any]) -> None:
        if body["version"] < 0:
            raise Refused("version: below 0")
        for state in self._upstreams(body):
            computes = not (state.paused or state.is_new)
            if computes and state.version != body["version"]:
                self.wrong.append("the version is set while the engine computes")
            state.candidate_version = body["version"]
            if "model" not in body:
                state.version = body["version"]
            if not body.keys() & {"model", "upstream"}:
                state.is_new = False

    def api_push_release(self, query: dict[str, str], body: dict[str, Any]) -> None:
        for state in self._upstreams(body):
            state.held = state.is_new  # a new one waits for its first version

    def api_push_canary(self, query: dict[str, str], body: dict[str, Any]) -> None:
        self.canary = body if body.keys() & {"upstream", "model"} else None
        if self.canary is None:
            self.state.candidate_version = self.state.version
