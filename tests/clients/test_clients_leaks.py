"""Token ids and log-probabilities never leave to a client that did not ask for them.

The engine is asked for both with every call; what goes out is searched as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import httpx
import pytest

from support.engines.mock_engine import END, ROLES, Answer, error, logprobs_of
from support.engines.prompt_driven_engine import PromptDrivenEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, assert_sampled
from support.proxy.raw_calls import RESPONSES, SAMPLED, RawCall
from support.proxy.servers import eventually

# The mock's text completions fail in no way.
CHATTED = [call for call in SAMPLED if call.name != "completions"]
SAY = Answer("Fine, thanks to everyone.", reasoning="Hm.")
TOOL_SAY = Answer("I look.", [("look", "{}")], "Hm.")

_TOKENS = "|".join(str(token) for token in (END, *ROLES.values()))
# The engine's words for them, the numbers that only they have, and what else would tell them.
LEAKS = re.compile(
    rb"token_ids|tokens_ids|prompt_token|kv_transfer|bytes\"|\"logprob\"|top_logprob"
    rb"|-0\.\d|-1\.0\b|[\[,:] *(" + _TOKENS.encode() + rb")\b"
)
# In OpenAI's usage, a number of tokens; the names of fields that are null or empty say nothing; how
# much the store's writer holds (/healthz).
HARMLESS = re.compile(
    rb'"prompt_tokens(_details)?":|"prompt_token_ids":null|"kv_transfer_params":null|"top_logprobs":0'
    rb'|"writer":\{[^{}]*\}'
)


def leaks(data: bytes) -> list[bytes]:
    return [found[0] for found in LEAKS.finditer(HARMLESS.sub(b"", data))]


@pytest.fixture
def http(rig: ProxyWithEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rig.base, timeout=20) as client:
        yield client


def all_bytes(answer: httpx.Response) -> bytes:
    headers = b"".join(name + b": " + value + b"\n" for name, value in answer.headers.raw)
    return headers + answer.content


def ask(http: httpx.Client, call: RawCall, *, stream: bool, again: bool = False) -> httpx.Response:
    path, body = call.asked(stream=stream)
    headers = {"x-stainless-retry-count": "1"} if again else {}
    return http.post(path, json=body, headers=headers)


def test_the_search_finds_what_the_engine_tells(
    engine: PromptDrivenEngine, rig: ProxyWithEngine
) -> None:
    """What the engine answers the proxy is full of it, in every shape it has."""
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        for more in ({}, {"stream": True}):
            asked = {"model": "m", **body, **more, "return_token_ids": True, "logprobs": True}
            asked["logprobs"] = 0 if "prompt" in asked else True
            told = httpx.post(rig.engine_url + path, json=asked).content
            found = set(leaks(told))
            assert b"token_ids" in found
            assert any(each.startswith(b"-0.") for each in found)
            assert any(each.endswith(str(END).encode()) for each in found)


@pytest.mark.parametrize("say", [SAY, TOOL_SAY], ids=["text", "tools"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", SAMPLED, ids=str)
def test_an_answer_and_its_repeat_have_none(
    http: httpx.Client,
    rig: ProxyWithEngine,
    engine: PromptDrivenEngine,
    call: RawCall,
    stream: bool,
    say: Answer,
) -> None:
    engine.replies.append(say)
    first = ask(http, call, stream=stream)
    again = ask(http, call, stream=stream, again=True)
    for answer in (first, again):
        assert answer.status_code == 200
        assert say.content.encode() in answer.content or stream
        assert leaks(all_bytes(answer)) == []
    [turn] = rig.turns()
    assert_sampled(turn, say)
    assert turn.completion_logprobs.tolist() == logprobs_of(say.token_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", CHATTED, ids=str)
def test_a_refusal_has_none(
    http: httpx.Client, engine: PromptDrivenEngine, call: RawCall, stream: bool
) -> None:
    engine.refusals.append((500, error("EngineCore died", 500), {}))
    for answer in (
        ask(http, call, stream=stream),
        http.post(call.asked(stream=stream)[0], content=b"{"),
    ):
        assert answer.status_code >= 400
        assert leaks(all_bytes(answer)) == []


@pytest.mark.parametrize("how", ["breaks off", "reports an error"])
@pytest.mark.parametrize("call", CHATTED, ids=str)
def test_a_stream_that_fails_midway_has_none(
    http: httpx.Client, rig: ProxyWithEngine, engine: PromptDrivenEngine, call: RawCall, how: str
) -> None:
    engine.replies.append(SAY)
    if how == "breaks off":
        engine.break_at = 3
    else:
        engine.error_at = 3
    answer = ask(http, call, stream=True)
    assert answer.status_code == 200
    assert leaks(all_bytes(answer)) == []
    [turn] = rig.turns()
    assert len(turn.completion_token_ids) == 12


@pytest.mark.parametrize("call", CHATTED, ids=str)
def test_what_a_client_sees_before_it_hangs_up_has_none(
    http: httpx.Client, rig: ProxyWithEngine, engine: PromptDrivenEngine, call: RawCall
) -> None:
    engine.replies.append(Answer(SAY.content))
    engine.wait_before(4)
    path, body = call.asked(stream=True)
    seen = b""
    with http.stream("POST", path, json=body) as answer:
        for data in answer.iter_raw():
            seen += data
            if b"Fin" in seen:
                break
    eventually(lambda: engine.aborted)
    assert leaks(seen) == []
    assert eventually(rig.turns)[0].untrainable == "aborted"


def test_the_logprobs_that_a_response_was_asked_for_bring_no_ids(
    http: httpx.Client, engine: PromptDrivenEngine
) -> None:
    """By its dialect's own field, and for the tokens of the text alone."""
    engine.replies += [Answer("Fine."), Answer("Fine.")]
    for stream in (False, True):
        path, body = RESPONSES.asked(stream=stream)
        asked = {**body, "include": ["message.output_text.logprobs"]}
        data = http.post(path, json=asked).content
        assert b'"logprob":-0.125' in data
        assert b"token_ids" not in data


READS: dict[str, Callable[[str], str]] = {
    "models": lambda url: f"{url}/v1/models",
    "push": lambda url: f"{url}/api/push",
    "healthz": lambda url: f"{url}/healthz",
}


@pytest.mark.parametrize("name", READS)
def test_no_other_route_tells_what_was_sampled(
    http: httpx.Client, rig: ProxyWithEngine, engine: PromptDrivenEngine, name: str
) -> None:
    engine.replies.append(SAY)
    ask(http, SAMPLED[0], stream=False)
    answer = httpx.get(READS[name](rig.url))
    assert answer.status_code == 200
    assert leaks(answer.content) == []
    assert b"Fine" not in answer.content
