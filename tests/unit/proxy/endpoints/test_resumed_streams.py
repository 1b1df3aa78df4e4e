"""A stream whose engine dies, at each of its tokens: what its client and the store have is what
they would have had, or it ends with an error where that cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from support.engines.mock_engine import Answer, render
from support.engines.replaying_engine import (
    CALL,
    THOUGHT,
    ReplayingEngine,
    tokens_of,
)
from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.servers import EngineServer
from tracegrad.events import Json
from tracegrad.proxy.dialects.openai_chat import OpenAIChatDialect
from tracegrad.proxy.engine.resume import resumed

HELLO = [{"role": "user", "content": "Hello"}]
SAYS = Answer("Ça va 😀", [("look", '{"at": {"é": 1}}'), ("go", "{}")], "hm, ä thought")
TEXT = Answer(" upön a time there was")


@pytest.fixture
def engine(engine_server: EngineServer) -> ReplayingEngine:
    engine_server.engine = found = ReplayingEngine(script=SAYS)
    return found


class Asked:
    """What a client of a stream got, put together."""

    def __init__(self, rig: ProxyWithEngine, name: str, path: str, **body: Any) -> None:
        url = f"/rollouts/{name}/v1/{path}"
        text = rig.http.post(url, json={"stream": True, **body}).text
        datas = [each.removeprefix("data: ") for each in text.split("\n\n") if each]
        chunks = [orjson.loads(each) for each in datas if each != "[DONE]"]
        self.error = next((chunk["error"] for chunk in chunks if "error" in chunk), None)
        self.usage = next((chunk["usage"] for chunk in chunks if chunk.get("usage")), None)
        choices = [choice for chunk in chunks for choice in chunk.get("choices") or ()]
        self.words = [_words(choice) for choice in choices if _words(choice)]
        self.tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
        told = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
        self.offsets = [at for each in told for at in each.get("text_offset") or ()]
        self.finish = next((c["finish_reason"] for c in choices if c.get("finish_reason")), None)

    @property
    def said(self) -> str:
        return "".join(self.words)


def _words(choice: Json) -> str:
    if "text" in choice:
        return str(choice["text"])
    delta = choice["delta"]
    thought = delta.get("reasoning") or ""
    calls = [orjson.dumps(call).decode() for call in delta.get("tool_calls") or ()]
    # Kinds are told apart, pieces of one kind are joined.
    return (thought.upper() if thought else delta.get("content") or "") + "".join(calls)


def reset(engine: ReplayingEngine, dies_after: int | None) -> None:
    engine.requests.clear()
    engine.dies_after = dies_after


def cut_in(tokens: list[int], at: int) -> str:
    """What the engine was in the middle of, `at` so many tokens."""
    said = tokens[:at]
    if CALL in said:
        # Its name is told with the quote behind it.
        of_it = bytes(token for token in said[said.index(CALL) + 1 :] if token < 256)
        return "call" if of_it.startswith(b'{"name": "look"') else "text"
    behind = tokens[tokens.index(THOUGHT) + 1 : at]
    if THOUGHT in tokens[: at + 1] and len(behind) < len(SAYS.content[0].encode()):
        return "end of a thought"
    return "text"


def test_a_chat_goes_on_from_every_token_that_is_not_of_a_tool_call(
    rig: ProxyWithEngine, engine: ReplayingEngine
) -> None:
    tokens = tokens_of(SAYS)
    asks: Json = {"messages": HELLO, "stream_options": {"include_usage": True}}
    whole = Asked(rig, "whole", "chat/completions", **asks)
    assert (whole.error, whole.finish) == (None, "tool_calls")
    assert whole.said.startswith("HM, Ä THOUGHTÇa va 😀{")
    broken = []
    for at in range(1, len(tokens)):
        reset(engine, at)
        name = f"cut-{at}"
        found = Asked(rig, name, "chat/completions", **asks)
        [turn] = rig.turns(name)
        assert turn.prompt_token_ids.tolist() == render(HELLO)
        if found.error is not None:
            broken.append(cut_in(tokens, at))
            assert turn.untrainable == "aborted"
            assert turn.completion_token_ids.tolist() == tokens[: len(turn.completion_token_ids)]
            continue
        assert cut_in(tokens, at) == "text"
        assert (found.said, found.finish, found.usage) == (whole.said, whole.finish, whole.usage)
        assert (turn.untrainable, turn.completion_token_ids.tolist()) == (None, tokens)
        assert len(engine.requests) == 2
    assert set(broken) == {"call", "end of a thought"}
    # Behind its last word, the tag that ends it, and half of the next letter.
    assert broken.count("end of a thought") == 3


def test_a_thought_that_the_next_engine_does_not_see_is_an_error(
    rig: ProxyWithEngine, engine: ReplayingEngine
) -> None:
    """Its parser would tell the rest of the thought as the answer."""
    engine.sees_open_thoughts = False
    reset(engine, 1 + len("hm, "))
    found = Asked(rig, "r1", "chat/completions", messages=HELLO)
    assert found.error is not None
    assert "inside a thought" in found.error["message"]
    assert found.said == "HM, "
    [turn] = rig.turns()
    assert turn.untrainable == "aborted"
    # With half of the next letter, which came before the first word that was none of a thought.
    assert turn.completion_token_ids.tolist() == tokens_of(SAYS)[:6]


def test_a_grammar_that_the_engine_takes_by_itself_looks_back_at_the_reply() -> None:
    body = orjson.dumps({"model": "m", "messages": HELLO})
    call = OpenAIChatDialect().parse(body, {}, {})
    assert resumed(call, 3) is not None
    assert resumed(replace(call, untrainable="constrained"), 3) is None


@pytest.mark.parametrize(
    ("prompt", "shows"),
    [("Once", {}), (list(b"Once"), {"logprobs": 0, "return_token_ids": True})],
    ids=["text", "tokens"],
)
@pytest.mark.parametrize("limit", [{"max_tokens": 40}, {"max_tokens": 9}, {}], ids=str)
def test_a_text_completion_goes_on_from_every_token(
    rig: ProxyWithEngine, engine: ReplayingEngine, limit: Json, prompt: Any, shows: Json
) -> None:
    engine.script = TEXT
    asks: Json = {"prompt": prompt, "stream_options": {"include_usage": True}, **limit, **shows}
    whole = Asked(rig, "whole", "completions", **asks)
    [uncut] = rig.turns("whole")
    tokens = uncut.completion_token_ids.tolist()
    for at in range(1, len(tokens)):
        reset(engine, at)
        name = f"cut-{at}"
        found = Asked(rig, name, "completions", **asks)
        [turn] = rig.turns(name)
        if shows and tokens[at - 1] == "ö".encode()[0]:
            assert found.error is not None, "its client has a token whose letter is not whole"
            continue
        assert (found.error, found.said, found.usage) == (None, whole.said, whole.usage)
        assert (found.tokens, found.offsets) == (whole.tokens, whole.offsets)
        assert found.finish == whole.finish
        assert turn.prompt_token_ids.tolist() == list(b"Once")
        assert turn.completion_token_ids.tolist() == tokens
        assert turn.untrainable is None
        assert turn.request == uncut.request


@pytest.mark.parametrize(
    "more",
    [{"stop": ["!"]}, {"echo": True}, {"truncate_prompt_tokens": 4}, {"presence_penalty": 0.5}],
    ids=str,
)
def test_a_text_completion_that_looks_back_ends_with_an_error(
    rig: ProxyWithEngine, engine: ReplayingEngine, more: Json
) -> None:
    engine.script = TEXT
    reset(engine, 3)
    found = Asked(rig, "r1", "completions", prompt="Once", **more)
    assert found.error is not None
    assert len(engine.requests) == 1
