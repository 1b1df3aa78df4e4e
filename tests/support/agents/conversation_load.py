"""Agents that call a proxy until they are told to stop, whatever it answers, and remember it.

Behind the proxy is the mock engine, whose tokens a test can work out from what was said.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from support.engines.mock_engine import END, render
from tracegrad.store import Store

Json = dict[str, Any]
_TURNS = 4


@dataclass(frozen=True)
class CompletedCall:
    """A call whose end its client saw."""

    rollout_id: str
    completion_id: str
    messages: list[Json]
    text: str


@dataclass(frozen=True)
class FailedCall:
    """A call that did not end well. `status` None: the connection broke, or there was none."""

    kind: str  # "whole" | "stream" | "event"
    status: int | None
    message: str
    retry_after: str | None
    in_stream: bool
    seconds: float


@dataclass
class ConversationLoad:
    """Each caller has conversations of four turns, streamed and not, and rewards them."""

    url: str
    count: int
    ended: list[CompletedCall] = field(default_factory=list)
    rewarded: list[str] = field(default_factory=list)
    failed: list[FailedCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, args=(f"c{number}",), daemon=True)
            for number in range(self.count)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive(), "a call hangs"

    def _work(self, name: str) -> None:
        number = 0
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self._over.is_set():
                number += 1
                self._conversation(client, f"{name}-{number}")

    def _conversation(self, client: httpx.Client, rollout: str) -> None:
        messages: list[Json] = []
        for turn in range(_TURNS):
            messages = [*messages, {"role": "user", "content": f"{rollout}, question {turn}"}]
            text, stream = None, turn % 2 == 1
            while text is None:
                if self._over.is_set():
                    return
                text = self.call(client, rollout, messages, stream=stream)
                stream = not stream  # so that a fault meets both kinds, however long it lasts
            messages = [*messages, {"role": "assistant", "content": text}]
        while not self._over.is_set() and not self.reward(client, rollout):
            pass

    def call(
        self, client: httpx.Client, rollout: str, messages: list[Json], *, stream: bool
    ) -> str | None:
        """The answer; None after a failure, a moment later."""
        path = f"/rollouts/{rollout}/v1/chat/completions"
        body = {"model": "m", "messages": messages, "stream": stream}
        began = time.monotonic()
        kind = "stream" if stream else "whole"
        try:
            with client.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    return self._was_refused(kind, answer, began)
                if not stream:
                    whole = json.loads(answer.read())
                    said = whole["id"], whole["choices"][0]["message"]["content"]
                else:
                    said = _streamed(answer.iter_lines())
        except _InStream as error:
            return self._failed(
                FailedCall(kind, 200, str(error), None, True, time.monotonic() - began)
            )
        except httpx.HTTPError as error:
            return self._failed(
                FailedCall(kind, None, repr(error), None, False, time.monotonic() - began)
            )
        with self._lock:
            self.ended.append(CompletedCall(rollout, said[0], messages, said[1]))
        return said[1]

    def reward(self, client: httpx.Client, rollout: str) -> bool:
        event = {
            "type": "reward",
            "reward_id": f"{rollout}.reward",
            "rollout_id": rollout,
            "value": 1.0,
        }
        began = time.monotonic()
        try:
            answer = client.post("/api/events", json={"events": [event]})
        except httpx.HTTPError as error:
            self._failed(
                FailedCall("event", None, repr(error), None, False, time.monotonic() - began)
            )
            return False
        if answer.status_code != 200:
            self._was_refused("event", answer, began)
            return False
        with self._lock:
            self.rewarded.append(rollout)
        return True

    def _was_refused(self, kind: str, answer: httpx.Response, began: float) -> None:
        self._failed(
            FailedCall(
                kind,
                answer.status_code,
                answer.text,
                answer.headers.get("retry-after"),
                False,
                time.monotonic() - began,
            )
        )

    def _failed(self, failed: FailedCall) -> None:
        with self._lock:
            self.failed.append(failed)
        self._over.wait(0.05)


class _InStream(Exception):
    """The stream says that it failed, or has no end."""


def _streamed(lines: Iterable[str]) -> tuple[str, str]:
    """Id and text of a stream that came to its end."""
    name, text = "", ""
    for line in lines:
        if line == "data: [DONE]":
            return name, text
        if line.startswith("data: "):
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise _InStream(chunk["error"]["message"])
            name = chunk["id"]
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
    raise httpx.RemoteProtocolError("the stream has no end")


def lost_calls(store: Store, callers: ConversationLoad) -> list[str]:
    """What clients were told is done, and the store does not have, whole and once."""
    faults = []
    rollouts = {ended.rollout_id for ended in callers.ended} | set(callers.rewarded)
    turns = {name: store.rollout_turns(name) for name in rollouts}
    ids = {name: Counter((t.response or {}).get("id") for t in turns[name]) for name in rollouts}
    for ended in callers.ended:
        call = f"the call {ended.completion_id} of rollout {ended.rollout_id}"
        if (times := ids[ended.rollout_id][ended.completion_id]) != 1:
            faults.append(f"{call} was seen to end, and is in the store {times} times")
            continue
        turn = next(
            t for t in turns[ended.rollout_id] if (t.response or {})["id"] == ended.completion_id
        )
        if list(turn.prompt_token_ids) != render(ended.messages):
            faults.append(f"{call} has other prompt tokens than the engine had")
        if list(turn.completion_token_ids) != [*ended.text.encode(), END]:
            faults.append(f"{call} has other completion tokens than the engine made")
        if (turn.request or {}).get("messages") != ended.messages:
            faults.append(f"{call} has another request than was sent")
    for name in callers.rewarded:
        if [reward.reward_id for reward in store.rewards(name)] != [f"{name}.reward"]:
            faults.append(f"the reward of rollout {name} was accepted: {store.rewards(name)}")
    return faults
