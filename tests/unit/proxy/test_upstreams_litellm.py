"""Teachers behind litellm: tiny stand-ins for the APIs of OpenAI and Anthropic, on loopback."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from support.plain_engine import Asked, Line, PlainEngine
from tracegrad.proxy import sse
from tracegrad.proxy.errors import ApiError, BadRequest
from tracegrad.proxy.upstreams import Timeouts
from tracegrad.proxy.upstreams.base import TEXT_ONLY
from tracegrad.proxy.upstreams.litellm import LiteLLM
from tracegrad.proxy.upstreams.litellm_shapes import keywords

# Without importing it: that is the adapter's, which sees to it that it keeps to itself.
if importlib.util.find_spec("litellm") is None:
    pytest.skip("litellm is not installed", allow_module_level=True)

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Add 1 and 2."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
CALLS = [
    {
        "id": "call_1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    },
    {"id": "call_2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
]
# A conversation that has been through tools already.
LATER = [
    {"role": "system", "content": "Be brief."},
    USER,
    {
        "role": "assistant",
        "content": None,
        "reasoning": "secret thoughts",
        "tool_calls": [CALLS[0]],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "3"},
]


class Provider:
    """A stand-in of one provider: what it answers, as litellm's model name and base URL."""

    def __init__(self, name: str, engine: PlainEngine) -> None:
        self.name = name
        self.engine = engine
        engine.behave = self._answer
        self.refusal: tuple[int, str] | None = None
        self.break_after: int | None = None  # pieces of a stream
        self.end_after: int | None = None
        self.hang = asyncio.Event()
        self.hang.set()

    @property
    def model(self) -> str:
        return f"{self.name}/teacher"

    @property
    def api_base(self) -> str:
        return self.engine.url + ("/v1" if self.name == "openai" else "")

    @property
    def asked(self) -> Json:
        body: Json = self.engine.asked[-1].json
        return body

    async def _answer(self, asked: Asked, line: Line) -> None:
        await self.hang.wait()
        if self.refusal is not None:
            status, message = self.refusal
            error = {"type": "error", "error": {"type": "some_error", "message": message}}
            headers = {"content-type": "application/json", "retry-after": "7"}
            await line.say(json.dumps(error).encode(), status, headers)
        elif asked.json.get("stream"):
            await self._stream(line)
        else:
            answer = OPENAI_ANSWER if self.name == "openai" else ANTHROPIC_ANSWER
            await line.say(
                json.dumps(answer).encode(), headers={"content-type": "application/json"}
            )

    async def _stream(self, line: Line) -> None:
        await line.begin()
        pieces = OPENAI_STREAM if self.name == "openai" else ANTHROPIC_STREAM
        for number, piece in enumerate(pieces):
            if number == self.break_after:
                line.break_off()
                return
            if number == self.end_after:
                break
            kind = f"event: {piece['type']}\n" if "type" in piece else ""
            await line.piece(f"{kind}data: {json.dumps(piece)}\n\n".encode())
        else:
            if self.name == "openai":
                await line.piece(b"data: [DONE]\n\n")
        await line.end()


OPENAI_ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1700000000,
    "model": "teacher-1",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Adding.",
                "reasoning_content": "One and two.",
                "tool_calls": CALLS,
            },
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 30, "completion_tokens": 9, "total_tokens": 39},
}
ANTHROPIC_ANSWER = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "teacher-1",
    "content": [
        {"type": "thinking", "thinking": "One and two.", "signature": "signed"},
        {"type": "text", "text": "Adding."},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_2", "name": "stop", "input": {}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 30, "output_tokens": 9},
}


def _openai_chunk(delta: Json, finish: str | None = None) -> Json:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {**_OPENAI_HEAD, "choices": choices}


def _tool_delta(index: int, arguments: str, **first: str) -> Json:
    function = {"arguments": arguments, **({"name": first["name"]} if first else {})}
    opening = {"id": first["id"], "type": "function"} if first else {}
    return {"tool_calls": [{"index": index, **opening, "function": function}]}


def _block(index: int, start: Json, *deltas: Json) -> list[Json]:
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


_OPENAI_HEAD = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1700000000,
    "model": "teacher-1",
}
OPENAI_STREAM = [
    _openai_chunk({"role": "assistant", "content": ""}),
    _openai_chunk({"reasoning_content": "One and two."}),
    _openai_chunk({"content": "Add"}),
    _openai_chunk({"content": "ing."}),
    _openai_chunk(_tool_delta(0, "", id="call_1", name="add")),
    _openai_chunk(_tool_delta(0, '{"a": ')),
    _openai_chunk(_tool_delta(0, "1}")),
    _openai_chunk(_tool_delta(1, "{}", id="call_2", name="stop")),
    _openai_chunk({}, "tool_calls"),
    {**_OPENAI_HEAD, "choices": [], "usage": OPENAI_ANSWER["usage"]},
]
ANTHROPIC_STREAM = [
    {
        "type": "message_start",
        "message": {
            **ANTHROPIC_ANSWER,
            "content": [],
            "stop_reason": None,
            "usage": {"input_tokens": 30, "output_tokens": 1},
        },
    },
    *_block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "One and two."},
        {"type": "signature_delta", "signature": "signed"},
    ),
    *_block(
        1,
        {"type": "text", "text": ""},
        {"type": "text_delta", "text": "Add"},
        {"type": "text_delta", "text": "ing."},
    ),
    *_block(
        2,
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {}},
        {"type": "input_json_delta", "partial_json": '{"a": '},
        {"type": "input_json_delta", "partial_json": "1}"},
    ),
    *_block(
        3,
        {"type": "tool_use", "id": "call_2", "name": "stop", "input": {}},
        {"type": "input_json_delta", "partial_json": "{}"},
    ),
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {"output_tokens": 9},
    },
    {"type": "message_stop"},
]


@pytest.fixture(params=["openai", "anthropic"])
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[Provider]:
    engine = await PlainEngine().start()
    yield Provider(request.param, engine)
    engine.kill()


Teacher = Callable[..., LiteLLM]


@pytest.fixture
async def teacher(provider: Provider) -> AsyncIterator[Teacher]:
    opened: list[LiteLLM] = []

    def make(**options: Any) -> LiteLLM:
        made = LiteLLM(api_base=provider.api_base, api_key="provider-key", **options)
        made.open()
        opened.append(made)
        return made

    yield make
    for made in opened:
        await made.close()


def call(provider: Provider, **fields: Any) -> bytes:
    body = {"model": provider.model, "messages": [USER], "max_tokens": 50, **fields}
    return json.dumps(body).encode()


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
AGENT = {"authorization": "Bearer tg-r1", "content-type": "application/json"}


async def whole(upstream: LiteLLM, body: bytes) -> Json:
    async with upstream.request("POST", CHAT, body=body, headers=AGENT) as answer:
        assert answer.status == 200
        told: Json = json.loads(await answer.read())
        return told


async def chunks(upstream: LiteLLM, body: bytes) -> list[Json]:
    async with upstream.request("POST", CHAT, body=body, headers=AGENT) as answer:
        assert answer.status == 200
        buffer = sse.EventBuffer()
        payloads = [
            sse.payload(event)
            async for data in answer.content.iter_any()
            for event in buffer.feed(data)
        ]
    assert payloads.pop() == sse.DONE
    return [json.loads(payload or b"") for payload in payloads]


def tool_calls(message: Json) -> list[tuple[str, str, Json]]:
    return [
        (each["id"], each["function"]["name"], json.loads(each["function"]["arguments"]))
        for each in message["tool_calls"]
    ]


SAID = [("call_1", "add", {"a": 1}), ("call_2", "stop", {})]


async def test_a_whole_answer_is_a_chat_completion_without_tokens(
    provider: Provider, teacher: Teacher
) -> None:
    answer = await whole(teacher(), call(provider, tools=TOOLS))
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (
        0,
        "tool_calls",
        None,
    )
    message = choice["message"]
    assert (message["role"], message["content"]) == ("assistant", "Adding.")
    assert message["reasoning"] == "One and two."
    assert tool_calls(message) == SAID
    counts = {name: answer["usage"][name] for name in OPENAI_ANSWER["usage"]}  # type: ignore[attr-defined]
    assert counts == OPENAI_ANSWER["usage"]
    assert "token_ids" not in choice
    assert "prompt_token_ids" not in answer
    [asked] = provider.engine.asked
    keys = {asked.headers.get("authorization"), asked.headers.get("x-api-key")}
    assert keys & {"Bearer provider-key", "provider-key"}
    assert "tg-r1" not in str(asked.headers)


async def test_a_stream_is_chunks_without_tokens(provider: Provider, teacher: Teacher) -> None:
    told = await chunks(teacher(), call(provider, tools=TOOLS, **STREAM))
    assert {chunk["object"] for chunk in told} == {"chat.completion.chunk"}
    *spoken, end, usage = told
    deltas = [choice["delta"] for chunk in spoken for choice in chunk["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "One and two."
    assert [delta["content"] for delta in deltas if "content" in delta] == ["Add", "ing."]
    joined: dict[int, Json] = {}
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
        known = joined.setdefault(
            piece["index"], {**piece, "function": {"name": "", "arguments": ""}}
        )
        for name, value in piece["function"].items():
            known["function"][name] += value
    assert sorted(joined) == [0, 1]
    assert tool_calls({"tool_calls": [joined[0], joined[1]]}) == SAID
    assert [choice["finish_reason"] for choice in end["choices"]] == ["tool_calls"]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 30
    assert usage["usage"]["completion_tokens"] == 9
    assert provider.asked["stream"] is True


async def test_a_conversation_with_tools_reaches_the_provider_in_its_own_form(
    provider: Provider, teacher: Teacher
) -> None:
    fields = {"temperature": 0.5, "stop": ["END"], "tool_choice": "auto", "n": None}
    await whole(teacher(), call(provider, messages=LATER, tools=TOOLS, **fields))
    asked = provider.asked
    assert asked["model"] == "teacher"
    assert asked["temperature"] == 0.5
    assert "secret thoughts" not in json.dumps(asked), "reasoning is not signed"
    assert "n" not in asked
    if provider.name == "openai":
        assert asked["stop"] == ["END"]
        assert [message["role"] for message in asked["messages"]] == [
            "system",
            "user",
            "assistant",
            "tool",
        ]
        assert asked["messages"][2]["tool_calls"] == [CALLS[0]]
        assert asked["messages"][3]["tool_call_id"] == "call_1"
    else:
        assert asked["stop_sequences"] == ["END"]
        assert "Be brief." in json.dumps(asked["system"])
        use, result = asked["messages"][1]["content"][0], asked["messages"][2]["content"][0]
        assert (use["type"], use["id"], use["input"]) == ("tool_use", "call_1", {"a": 1})
        assert (result["type"], result["tool_use_id"]) == ("tool_result", "call_1")


async def test_the_upstreams_own_model_serves_calls_without_one_and_is_listed(
    provider: Provider, teacher: Teacher
) -> None:
    upstream = teacher(model=provider.model)
    await whole(upstream, json.dumps({"messages": [USER], "max_tokens": 5}).encode())
    assert provider.asked["model"] == "teacher"
    async with upstream.request("GET", "/v1/models", body=None, headers={}) as answer:
        assert [model["id"] for model in json.loads(await answer.read())["data"]] == [
            provider.model
        ]
    assert json.loads(await teacher().models())["data"] == []
    assert upstream.capabilities == TEXT_ONLY


@pytest.mark.parametrize("stream", [{}, STREAM])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (429, "rate_limit_error"),
        (503, "upstream_error"),
    ],
)
async def test_a_providers_refusal_keeps_its_status(
    provider: Provider, teacher: Teacher, status: int, kind: str, stream: Json
) -> None:
    provider.refusal = (status, "the teacher is indisposed")
    with pytest.raises(ApiError, match="the teacher is indisposed") as caught:
        await whole(teacher(), call(provider, **stream))
    assert (caught.value.status, caught.value.kind) == (status, kind)
    assert len(provider.engine.asked) == 1, "the client decides whether to try again"
    if status in (429, 503):
        assert caught.value.headers()["retry-after"] in ("7", "1")


async def test_a_prompt_that_is_too_long_has_its_own_code(
    provider: Provider, teacher: Teacher
) -> None:
    said = {
        "openai": "This model's maximum context length is 10 tokens.",
        "anthropic": "prompt is too long: 12 tokens > 10 maximum",
    }
    provider.refusal = (400, said[provider.name])
    with pytest.raises(BadRequest) as caught:
        await whole(teacher(), call(provider))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize("how", ["break_after", "end_after"])
async def test_a_stream_without_an_end_is_not_taken_for_a_whole_one(
    provider: Provider, teacher: Teacher, how: str
) -> None:
    setattr(provider, how, 7)
    with pytest.raises(ApiError) as caught:
        await chunks(teacher(), call(provider, **STREAM))
    assert caught.value.status >= 500


async def test_a_provider_that_is_silent_is_a_504(provider: Provider, teacher: Teacher) -> None:
    provider.hang.clear()
    upstream = teacher(timeouts=Timeouts(read_s=0.2))
    for stream in ({}, STREAM):
        with pytest.raises(ApiError, match=r"sent nothing for 0\.2 s") as caught:
            await whole(upstream, call(provider, **stream))
        assert caught.value.status == 504


async def test_a_provider_that_is_not_there_is_an_error_to_try_again(
    provider: Provider, teacher: Teacher
) -> None:
    provider.engine.kill()
    with pytest.raises(ApiError) as caught:
        await whole(teacher(), call(provider))
    assert caught.value.status >= 500


async def test_who_leaves_a_stream_hangs_up(provider: Provider, teacher: Teacher) -> None:
    async def endless(asked: Asked, line: Line) -> None:
        pieces = OPENAI_STREAM if provider.name == "openai" else ANTHROPIC_STREAM
        await line.begin()
        for number in range(10_000):
            piece = pieces[number if number < 7 else 6]
            kind = f"event: {piece['type']}\n" if "type" in piece else ""
            await line.piece(f"{kind}data: {json.dumps(piece)}\n\n".encode())
            await asyncio.sleep(0.01)

    provider.engine.behave = endless
    body = call(provider, **STREAM)
    async with teacher().request("POST", CHAT, body=body, headers=AGENT) as answer:
        assert await anext(answer.iter_any())
        assert provider.engine.open == 1
    async with asyncio.timeout(5):
        while provider.engine.open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("api_base", "http://127.0.0.1:1"),
        ("base_url", "http://127.0.0.1:1"),
        ("api_key", "mine"),
        ("mock_response", "boo"),
        ("extra_headers", {"a": "b"}),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_fields_that_are_litellms_own_or_vllms_are_refused(field: str, value: object) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        keywords({"messages": [USER], field: value})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert keywords({"messages": [USER], field: None}) == {"messages": [USER]}


async def test_what_a_model_cannot_do_is_refused_not_dropped(
    provider: Provider, teacher: Teacher
) -> None:
    if provider.name == "anthropic":
        with pytest.raises(ApiError, match="seed") as caught:
            await whole(teacher(), call(provider, seed=3))
        assert caught.value.status == 400
        assert provider.engine.asked == []
    else:
        await whole(teacher(), call(provider, seed=3))
        assert provider.asked["seed"] == 3


async def test_other_routes_and_calls_without_a_model_are_refused(
    provider: Provider, teacher: Teacher
) -> None:
    upstream = teacher()
    with pytest.raises(BadRequest, match="chat completions only") as caught:
        async with upstream.request("POST", "/v1/embeddings", body=b"{}", headers={}):
            pass
    assert caught.value.status == 404
    with pytest.raises(BadRequest, match="anthropic/claude") as caught:
        await whole(upstream, json.dumps({"messages": [USER]}).encode())
    assert caught.value.param == "model"
    with pytest.raises(ApiError, match="provider"):
        await whole(upstream, json.dumps({"model": "nonsense", "messages": [USER]}).encode())


@pytest.mark.parametrize("version", ["1.82.7", "1.82.8", "1.61.20"])
def test_a_litellm_from_before_the_break_in_is_not_imported(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(importlib, "import_module", pytest.fail)
    with pytest.raises(ValueError, match=f"litellm {version} is older"):
        LiteLLM().open()


def test_without_litellm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=r"pip install 'tracegrad\[litellm\]'"):
        LiteLLM().open()


ALONE = """
import asyncio, json, sys

went = []
def watch(event, args):
    if event == "socket.getaddrinfo":
        went.append(args[0])
    elif event == "socket.connect" and isinstance(args[1], tuple):
        went.append(args[1][0])
sys.addaudithook(watch)

sys.path[:0] = json.loads(sys.argv[1])
from tracegrad.proxy.upstreams import Upstreams
assert "litellm" not in sys.modules, "kept out until it is opened"
from support.plain_engine import PlainEngine
from unit.proxy.test_upstreams_litellm import STREAM, TOOLS, Provider, call, chunks, whole
from tracegrad.proxy.upstreams.litellm import LiteLLM

async def main():
    for name in ("openai", "anthropic"):
        engine = await PlainEngine().start()
        provider = Provider(name, engine)
        upstream = LiteLLM(api_base=provider.api_base, api_key="k")
        upstream.open()
        await whole(upstream, call(provider, tools=TOOLS))
        await chunks(upstream, call(provider, **STREAM))
        # A model with features that litellm looks up the headers for.
        schema = {"name": "s", "schema": {"type": "object", "properties": {}}}
        wanted = {"type": "json_schema", "json_schema": schema}
        latest = {"model": f"{name}/claude-sonnet-4-5", "response_format": wanted}
        await whole(upstream, call(provider, **latest))
        await upstream.close()
        engine.kill()

asyncio.run(main())
import os
print(json.dumps({"went": sorted(set(map(str, went))), "dotenv": os.environ.get("LEAKED")}))
"""


def test_litellm_talks_to_nobody_but_the_provider(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("LEAKED=yes\n")
    root = Path(__file__).resolve().parents[3]
    paths = json.dumps([str(root / "tests"), str(root / "sdk")])
    plain = {k: v for k, v in os.environ.items() if not k.startswith("LITELLM_")}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE, paths],
        cwd=tmp_path,
        env=plain,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert set(told["went"]) <= {"127.0.0.1", "None"}
    assert "127.0.0.1" in told["went"]
    assert told["dotenv"] is None
