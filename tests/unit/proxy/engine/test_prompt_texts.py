"""A prompt whose ids are known is not read again; what is kept is bounded."""

from __future__ import annotations

import orjson
import pytest

from tracegrad.chat.call import Call
from tracegrad.events import token_id_array
from tracegrad.proxy.dialects.openai_chat import OpenAIChatDialect
from tracegrad.proxy.engine import fast_parse, request
from tracegrad.proxy.engine.fast_parse import extract_prompt
from tracegrad.proxy.engine.prompt_texts import LARGEST_BYTES, SMALLEST_BYTES, PromptTexts
from tracegrad.proxy.engine.request import EngineRequest, request_body


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> PromptTexts:
    texts = PromptTexts()
    for module in (fast_parse, request):
        monkeypatch.setattr(module, "prompt_texts", texts)
    return texts


def a_call() -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    return OpenAIChatDialect().parse(orjson.dumps(body), {}, {})


def test_the_prompt_that_an_engine_was_given_comes_back_as_the_same_array(
    known: PromptTexts,
) -> None:
    given = token_id_array(range(1000))
    asked = orjson.loads(request_body(a_call(), EngineRequest(stream=True, prompt_ids=given)))
    assert asked["kv_transfer_params"] == {"prompt_token_ids": given.tolist()}
    answer = orjson.dumps({"prompt_token_ids": given.tolist()})
    _, found = extract_prompt(answer)
    assert found is not None
    assert found.values is given


def test_a_prompt_that_comes_again_is_found_and_another_is_read(known: PromptTexts) -> None:
    for last in (7, 8):
        ids = [*range(1000), last]
        answer = orjson.dumps({"prompt_token_ids": ids})
        _, first = extract_prompt(answer)
        _, again = extract_prompt(answer)
        assert first is not None
        assert again is not None
        assert first.values is again.values
        assert first.values.tolist() == ids


def test_what_is_no_list_of_ids_is_not_kept(known: PromptTexts) -> None:
    raw = b'{"prompt_token_ids":[' + b",".join([b"-5"] * 1000) + b"]}"
    assert extract_prompt(raw) == (raw, None)
    assert known.size == 0


def test_the_oldest_go_when_there_are_too_many() -> None:
    texts = PromptTexts(most_bytes=20_000)
    ids = token_id_array(range(1000))
    made = [b"[%b]" % (b"%04d" % number * 300) for number in range(9)]
    for text in made:
        texts.add(text, ids)
        assert texts.get(made[0]) is ids  # asked for again and again: it stays
        assert texts.size <= 20_000
    assert texts.get(made[-1]) is ids
    assert texts.get(made[1]) is None
    size = texts.size
    texts.add(b"[1]".ljust(SMALLEST_BYTES - 1), token_id_array([1]))
    texts.add(b"[%b]" % (b"1" * LARGEST_BYTES), ids)
    assert texts.size == size
