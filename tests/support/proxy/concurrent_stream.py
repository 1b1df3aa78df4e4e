"""Somebody else's stream, open while a test does its worst."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from support.engines.mock_engine import Answer, logprobs_of
from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.servers import eventually

STORY = Answer("what the neighbour hears, from beginning to end")


@contextmanager
def concurrent_stream(rig: ProxyWithEngine) -> Iterator[None]:
    """A stream that begins before what runs inside and ends after it: it must come whole, and be
    recorded so. For an engine whose `replies` and gates nobody else uses meanwhile."""
    rig.engine.replies.append(STORY)
    gate = rig.engine.wait_before(4)
    heard: list[str] = []

    def listen() -> None:
        url = f"{rig.url}/rollouts/neighbour/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "Tell."}], "stream": True}
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            heard.extend(answer.iter_lines())

    thread = threading.Thread(target=listen)
    thread.start()
    eventually(lambda: not rig.engine.replies)
    yield
    gate.set()
    thread.join(60)
    chunks = [json.loads(line[6:]) for line in heard if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == STORY.content
    assert "data: [DONE]" in heard
    [turn] = rig.turns_of("neighbour")
    assert turn.untrainable is None
    assert turn.completion_token_ids.tolist() == STORY.token_ids
    assert turn.completion_logprobs.tolist() == logprobs_of(STORY.token_ids)
