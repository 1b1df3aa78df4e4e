"""The benchmark's mock engine speaks as vLLM does, and makes sense as a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httptools
import orjson
import pytest
from bench.proxy import answers
from bench.proxy.answers import PromptIds, Told
from bench.proxy.calls import REPLY_TOKENS, Prompt, Reply
from bench.proxy.text import END, VOCABULARY, encode, render

from support.engines.mock_engine import Answer, MockEngine

ALL = Told(ids=True, logprobs=True, usage=True)
ASKS_ALL = {
    "messages": [{"role": "user", "content": "q"}],
    "return_token_ids": True,
    "logprobs": True,
    "stream_options": {"include_usage": True},
}


class Http:
    """Takes a response apart."""

    def __init__(self, data: bytes) -> None:
        self.chunks: list[bytes] = []
        self.complete = False
        self.parser = httptools.HttpResponseParser(self)
        self.parser.feed_data(data)
        assert self.complete

    def on_body(self, body: bytes) -> None:
        self.chunks.append(body)

    def on_message_complete(self) -> None:
        self.complete = True

    @property
    def json(self) -> Any:
        return orjson.loads(b"".join(self.chunks))

    @property
    def events(self) -> list[Any]:
        events = b"".join(self.chunks).decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [orjson.loads(event.removeprefix("data: ")) for event in events[:-2]]


def shape(value: Any) -> Any:
    """What must be alike in two answers of one API: names, types, and that of a list's items."""
    if isinstance(value, Mapping):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def whole(told: Told, reply: Reply, number: int = 1) -> Any:
    return Http(answers.whole(PromptIds([5, 6, 7]), reply, told, number)).json


def streamed(told: Told, reply: Reply, chunk_tokens: int = 1, number: int = 1) -> list[Any]:
    stream = answers.stream(PromptIds([5, 6, 7]), reply, told, chunk_tokens, number)
    return Http(b"".join(stream.piece(at) for at in range(stream.pieces))).events


def test_a_whole_answer_has_the_shape_of_vllms() -> None:
    theirs = MockEngine()._answer(ASKS_ALL, [Answer("some words")])
    assert shape(whole(ALL, Reply(0))) == shape(theirs)


async def test_a_streams_chunks_have_the_shapes_of_vllms() -> None:
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "mock"}
    engine = MockEngine(chunk_tokens=1)
    theirs = [chunk async for chunk in engine._chunks(ASKS_ALL, [Answer("some words")], head)]
    ours = streamed(ALL, Reply(0))
    said = next(chunk for chunk in theirs[1:] if chunk["choices"][0]["delta"])
    assert shape(ours[0]) == shape(theirs[0])
    assert shape(ours[1]) == shape(said)
    # Before the usage: the one with the finish reason.
    assert shape(ours[-2]) == shape(theirs[-2])
    assert shape(ours[-1]) == shape(theirs[-1])


@pytest.mark.parametrize("told", [Told(), Told(ids=True), Told(logprobs=True)])
def test_ids_and_logprobs_are_told_only_when_asked_for(told: Told) -> None:
    answer = whole(told, Reply(3))
    choice = answer["choices"][0]
    assert (answer["prompt_token_ids"] == [5, 6, 7]) == told.ids
    assert (choice["token_ids"] is not None) == told.ids
    assert (choice["logprobs"] is not None) == told.logprobs
    chunks = streamed(told, Reply(3))
    assert (chunks[0]["prompt_token_ids"] == [5, 6, 7]) == told.ids
    for chunk in chunks[1:]:
        assert (chunk["choices"][0]["token_ids"] is not None) == told.ids
        assert (chunk["choices"][0]["logprobs"] is not None) == told.logprobs


def test_a_reply_is_512_tokens_that_its_text_encodes_to() -> None:
    for number in range(20):
        reply = Reply(number)
        choice = whole(ALL, reply)["choices"][0]
        entries = choice["logprobs"]["content"]
        assert choice["token_ids"] == [*encode(choice["message"]["content"]), END]
        assert len(entries) == len(choice["token_ids"]) == REPLY_TOKENS
        assert all(entry["logprob"] < 0 for entry in entries)
        assert entries[0]["token"] == choice["message"]["content"][: len(entries[0]["token"])]
        assert all(bytes(e["bytes"]).decode() == e["token"] for e in entries)


@pytest.mark.parametrize("size", [1, 5, 8, 600])
def test_a_stream_put_together_is_the_whole_answer(size: int) -> None:
    reply = Reply(7)
    chunks = streamed(ALL, reply, size)
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == reply.text
    assert [i for choice in choices[1:] for i in choice["token_ids"]] == reply.ids
    told = [entry["logprob"] for choice in choices[1:] for entry in choice["logprobs"]["content"]]
    assert told == reply.logprobs
    assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len(choices) == 1 + -(-REPLY_TOKENS // size)


def test_no_two_answers_are_alike() -> None:
    first, second = whole(ALL, Reply(1), 1), whole(ALL, Reply(2), 2)
    assert first["id"] != second["id"]
    assert first["choices"][0]["message"]["content"] != second["choices"][0]["message"]["content"]
    assert streamed(ALL, Reply(1), number=1)[0]["id"] == first["id"]


@pytest.mark.parametrize("tokens", [200, 8192])
def test_prompts_have_the_length_they_say_and_differ(tokens: int) -> None:
    prompts = [render(Prompt(tokens, number).messages) for number in range(4)]
    assert [len(prompt) for prompt in prompts] == [tokens] * 4
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert all(0 <= token < VOCABULARY + 5 for prompt in prompts for token in prompt)


def test_a_conversation_that_goes_on_extends_its_tokens() -> None:
    messages = Prompt(200, 1).messages
    reply = Reply(4)
    earlier = [*render(messages), *reply.ids]
    told = [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "go on"}]
    assert render([*messages, *told])[: len(earlier)] == earlier
