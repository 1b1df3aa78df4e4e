"""Every dialect's answers through its vendor's client and back: the message that was sampled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines.engine_answers import (
    Said,
    chunk,
    said,
    same_message,
    spelled_objects,
    texts,
)
from support.proxy.answer_adapters import EVERY_ANSWER, AnswerAdapter
from tracegrad.proxy.http.errors import ApiError

TWO_CALLS = Said("I look.", "Hm.", [("look", '{"at": 1}'), ("see", '{\n "b": {}}')])
each_dialect = pytest.mark.parametrize("dialect", EVERY_ANSWER, ids=str)


@each_dialect
@settings(max_examples=60, deadline=None)
@given(one=said(spelled_objects | st.just("") | texts))
def test_a_whole_answer_comes_back_as_the_message_that_it_was(
    dialect: AnswerAdapter, one: Said
) -> None:
    assert same_message(dialect.message(dialect.answer(one)), one.message)


@each_dialect
@settings(max_examples=30, deadline=None)
@given(one=said(spelled_objects), size=st.integers(1, 9))
def test_a_streamed_answer_comes_back_as_the_message_that_it_was(
    dialect: AnswerAdapter, one: Said, size: int
) -> None:
    body = dialect.client.read(dialect.stream(one, size))
    assert same_message(dialect.message(body), one.message)


@each_dialect
async def test_the_vendors_async_client_puts_the_stream_together(dialect: AnswerAdapter) -> None:
    body = await dialect.client.read_async(dialect.stream(TWO_CALLS))
    assert same_message(dialect.message(body), TWO_CALLS.message)


@each_dialect
@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "look at it", '"x"', "null", "{'a': 1}"])
def test_arguments_that_are_no_object_are_given_as_they_are(
    dialect: AnswerAdapter, arguments: str
) -> None:
    body = dialect.answer(Said(calls=[("look", arguments)]))
    written = {"INVALID_JSON": arguments} if dialect.has_objects else arguments
    assert dialect.arguments(body) == written
    assert dialect.message(body)["tool_calls"][0]["function"]["arguments"] == arguments


@each_dialect
def test_an_error_amid_a_stream_is_raised(dialect: AnswerAdapter) -> None:
    writer = dialect.writer()
    stream = writer.begin(1) + writer.chunk(chunk({"content": "a"}))
    stream += writer.error(ApiError(503, "the engine is gone", kind="x"))
    with pytest.raises(dialect.client.raised, match="the engine is gone"):
        dialect.client.read(stream)
