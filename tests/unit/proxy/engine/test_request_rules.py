"""Which fields of a request reach the engine, and which media it may have to fetch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from support.engines.mock_engine import MODEL, MockEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from tracegrad.chat.call import Call
from tracegrad.events import Turn
from tracegrad.proxy.engine.request_rules import ALLOWED_FIELDS, REFUSED_FIELDS, RequestRules
from tracegrad.proxy.http.errors import BadRequest
from tracegrad.store import Store

ADMIN = "the-admin's-own-key"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
CHAT = {"model": MODEL, "messages": HELLO}
PNG = "data:image/png;base64,QQ=="
WEB = "https://pictures.example/a.png"


@pytest.fixture
def serve(serve_proxy: ServeProxy) -> Iterator[Callable[..., httpx.Client]]:
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(serve_proxy(**settings))


def rules(*domains: str, pass_unknown: bool = False) -> RequestRules:
    return RequestRules(pass_unknown=pass_unknown, media_domains=frozenset(domains))


def call_of(body: dict[str, Any]) -> Call:
    return Call("chat", body, body, stream=False)


def with_part(part: dict[str, Any]) -> Call:
    return call_of({"messages": [{"role": "user", "content": ["text", part]}]})


# Fields


def test_no_field_is_both_passed_and_refused() -> None:
    assert not ALLOWED_FIELDS & REFUSED_FIELDS.keys()


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
def test_a_dangerous_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(BadRequest) as refused:
        rules().apply(call_of({**CHAT, name: {"a": 1}}), admin=False)
    assert refused.value.param == name
    assert "pass_unknown_fields" in refused.value.message


@pytest.mark.parametrize("nothing", [None, False, 0, "", {}, []], ids=str)
def test_an_empty_one_asks_for_nothing(nothing: Any) -> None:
    """Libraries write their defaults out."""
    applied = rules().apply(
        call_of({**CHAT, **dict.fromkeys(REFUSED_FIELDS, nothing)}), admin=False
    )
    assert applied.body == CHAT


@pytest.mark.parametrize(
    ("field", "wrong", "named"),
    [
        ("structured_outputs", {"regex": "(a+)+$"}, "structured_outputs.regex"),
        ("structured_outputs", {"grammar": "root ::= root"}, "structured_outputs.grammar"),
        (
            "chat_template_kwargs",
            {"chat_template": "{{ 1 }}"},
            "chat_template_kwargs.chat_template",
        ),
        ("chat_template_kwargs", {"tools": [{}]}, "chat_template_kwargs.tools"),
        ("n", 129, "n"),
        ("response_format", {"type": "structural_tag", "format": {}}, "response_format.type"),
        ("response_format", {"type": ["text"]}, "response_format.type"),
        ("prompt", ["a"] * 2049, "prompt"),
    ],
)
def test_what_a_field_must_not_hold_is_named(field: str, wrong: Any, named: str) -> None:
    with pytest.raises(BadRequest) as refused:
        rules().apply(call_of({**CHAT, field: wrong}), admin=False)
    assert refused.value.param == named


@pytest.mark.parametrize("trusted", ["admin", "setting"])
def test_whoever_may_sends_everything(trusted: str) -> None:
    body = {
        **CHAT,
        **dict.fromkeys(REFUSED_FIELDS, 1),
        "newer": 2,
        "structured_outputs": {"regex": "a"},
    }
    applied = rules(pass_unknown=trusted == "setting").apply(
        call_of(body), admin=trusted == "admin"
    )
    assert applied.body == body


def test_documented_fields_pass_untouched() -> None:
    body = {
        **CHAT,
        **dict.fromkeys(("top_k", "seed", "max_tokens", "store", "verbosity", "ignore_eos"), 1),
        "chat_template_kwargs": {"enable_thinking": False},
        "structured_outputs": {"json": {}},
        "metadata": {"a": "b"},
    }
    call = call_of(body)
    assert rules().apply(call, admin=False) is call


def test_prompts_and_choices_multiply() -> None:
    asked = {"model": MODEL, "n": 128}
    for fits in ("a", [1] * 5000, ["a"] * 16):
        rules().apply(call_of({**asked, "prompt": fits}), admin=False)
    for many in (["a"] * 17, [[1]] * 17):
        with pytest.raises(BadRequest) as refused:
            rules().apply(call_of({**asked, "prompt": many}), admin=False)
        assert refused.value.param == "prompt"
        rules().apply(call_of({**asked, "prompt": many}), admin=True)


def test_a_field_of_a_newer_api_is_left_out_and_counted(
    serve: Callable[..., httpx.Client],
    engine: MockEngine,
    store: Store,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The agent goes on, the engine never sees it, and the record has what was sent."""
    http = serve()
    with caplog.at_level(logging.WARNING, "tracegrad.proxy"):
        for _ in range(3):
            answer = http.post(
                "/rollouts/r1/v1/chat/completions", json={**CHAT, "brand_new": [1], "user": "u"}
            )
            assert answer.status_code == 200
    assert all(
        "brand_new" not in reported and reported["user"] == "u" for reported in engine.requests
    )
    turns: list[Turn] = store.rollout_turns("r1")
    assert all((turn.request or {})["brand_new"] == [1] for turn in turns)
    said = [record.getMessage() for record in caplog.records if "brand_new" in record.getMessage()]
    assert len(said) == 1, "said once"


def test_names_that_a_client_makes_up_are_counted_within_bounds() -> None:
    held = rules()
    for number in range(1000):
        held.apply(call_of({**CHAT, f"{number}" + "x" * 1000: 1}), admin=False)
    assert sum(held.dropped_fields.values()) == 1000
    assert len(held.dropped_fields) <= 201
    assert max(map(len, held.dropped_fields)) <= 64


def test_an_agents_key_is_no_admins(serve: Callable[..., httpx.Client], engine: MockEngine) -> None:
    http = serve(admin_key=ADMIN)
    admin = {"authorization": f"Bearer {ADMIN}"}
    key = http.post("/api/rollouts/r1/keys", headers=admin).json()["key"]
    body = {**CHAT, "vllm_xargs": {"a": 1}}
    refused = http.post("/v1/chat/completions", json=body, headers={"x-api-key": key})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "vllm_xargs"
    assert http.post("/v1/chat/completions", json=body, headers=admin).status_code == 200
    assert [reported["vllm_xargs"] for reported in engine.requests] == [{"a": 1}]


OF_EVERY_DIALECT = {
    "/v1/chat/completions": {**CHAT, "vllm_xargs": {"a": 1}},
    "/v1/completions": {"model": MODEL, "prompt": "a", "vllm_xargs": {"a": 1}},
    "/v1/responses": {"model": MODEL, "input": "a", "vllm_xargs": {"a": 1}},
    "/v1/messages": {**CHAT, "max_tokens": 5, "vllm_xargs": {"a": 1}},
    f"/v1beta/models/{MODEL}:generateContent": {
        "contents": [{"parts": [{"text": "a"}]}],
        "vllmXargs": {"a": 1},
    },
}


@pytest.mark.parametrize("path", OF_EVERY_DIALECT)
def test_every_dialect_is_held_to_it(rig: ProxyWithEngine, path: str) -> None:
    answer = rig.http.post(path, json=OF_EVERY_DIALECT[path])
    assert answer.status_code == 400
    assert "vllm_xargs" in answer.text
    assert rig.engine.requests == []


# Media

LINKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda url: {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        ]
    },
    "/v1/responses": lambda url: {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    },
    "/v1/messages": lambda url: {
        "max_tokens": 5,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "url", "url": url}}],
            }
        ],
    },
    "/v1/messages/count_tokens": lambda url: LINKS["/v1/messages"](url) | {"max_tokens": None},
    f"/v1beta/models/{MODEL}:generateContent": lambda url: {
        "contents": [{"parts": [{"fileData": {"mimeType": "image/png", "fileUri": url}}]}]
    },
}


@pytest.mark.parametrize("path", LINKS)
def test_nothing_is_fetched_for_a_client_by_default(rig: ProxyWithEngine, path: str) -> None:
    for url in (WEB, "http://169.254.169.254/latest/meta-data", "http://127.0.0.1:8000/pause"):
        answer = rig.http.post(path, json={"model": MODEL} | LINKS[path](url))
        assert answer.status_code == 400, answer.text
        assert "allowed_media_domains" in answer.text
    assert rig.engine.requests == []


@pytest.mark.parametrize("path", [path for path in LINKS if "count" not in path])
def test_a_named_domain_is_passed_on(
    serve: Callable[..., httpx.Client], engine: MockEngine, path: str
) -> None:
    http = serve(allowed_media_domains=["Pictures.Example."])
    http.post(path, json={"model": MODEL} | LINKS[path](WEB))
    [reported] = engine.requests
    assert reported["messages"][0]["content"][0]["image_url"]["url"] == WEB


EMBEDDED: list[tuple[dict[str, Any], str]] = [
    ({"messages": LINKS["/v1/chat/completions"](WEB)["messages"]}, "messages[0].content[0]"),
    ({"input": ["a", {"image": WEB}]}, "input[1].image"),
    ({"input": [{"type": "text", "text": "a", "image_url": {"url": "file:///etc/passwd"}}]}, "in"),
    ({"input": "a", "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    ({"input": "a", "chat_template": "{{ 1 }}"}, "chat_template"),
]


@pytest.mark.parametrize(("body", "named"), EMBEDDED, ids=str)
def test_embeddings_are_held_to_the_same(
    rig: ProxyWithEngine, body: dict[str, Any], named: str
) -> None:
    answer = rig.http.post("/v1/embeddings", json={"model": MODEL} | body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(named)
    assert rig.engine.requests == []


def test_embeddings_of_texts_go_on_as_they_came() -> None:
    held = rules()
    raw = b'{ "model": "m", "input": ["http://a.example", "b"], "encoding_format": "base64" }'
    assert held.embeddings(raw, admin=False) is raw
    newer = b'{"model":"m","input":[[1,2]],"newer":1,"messages":null}'
    assert held.embeddings(newer, admin=False) == b'{"model":"m","input":[[1,2]]}'
    assert held.embeddings(newer, admin=True) is newer


REFERENCES = [
    {"type": "image_url", "image_url": {"url": WEB}},
    {"type": "image_url", "image_url": WEB},
    {"type": "input_image", "image_url": WEB},
    {"type": "video_url", "video_url": {"url": WEB}},
    {"type": "audio_url", "audio_url": {"url": WEB}},
    {"type": "input_audio", "input_audio": {"data": WEB, "format": "wav"}},
    {"type": "file", "file": {"file_url": WEB}},
    {"type": "something-new", "anywhere": [{"deep": WEB}]},
    # vLLM goes by these, whatever the type, where there is a uuid.
    {"type": "text", "text": "a", "uuid": "u", "image_url": WEB},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "image_url", "image_url": {"url": "FILE:/etc/passwd"}},
    {"type": "image_url", "image_url": {"url": " \n" * 200 + "http://127.0.0.1:8000/"}},
    {"type": "image_url", "image_url": {"url": "gopher://127.0.0.1/"}},
    # Parsers of URLs skip these.
    {"type": "image_url", "image_url": {"url": "\x01http://127.0.0.1:8000/"}},
    {"type": "image_url", "image_url": {"url": "h\nt\ttp" + "\r" * 3 + "://127.0.0.1:8000/"}},
    {"type": "image_url", "image_url": {"url": " \x00 fi\nle:/etc/passwd"}},
    {"type": "image_url", "image_url": {"url": "go\npher:\n/\t/127.0.0.1/"}},
    {"type": "image_embeds", "image_embeds": "QQ=="},
    {"type": "text", "text": "a", "uuid": "u", "prompt_embeds": "x", "data": "QQ=="},
]


@pytest.mark.parametrize("part", REFERENCES, ids=str)
@pytest.mark.parametrize("admin", [False, True])
def test_a_reference_in_any_part_is_refused(part: dict[str, Any], admin: bool) -> None:
    """From whomever: what the engine may reach is the operator's affair, who has a setting."""
    with pytest.raises(BadRequest) as refused:
        rules().apply(with_part(part), admin=admin)
    assert str(refused.value.param).startswith("messages[0].content[1]")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": PNG, "detail": "auto"}},
        {"type": "image_url", "image_url": {"url": "DATA:image/png;base64,QQ=="}},
        {"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}},
        {"type": "file", "file": {"file_data": PNG, "filename": r"C:\report: final.pdf"}},
        {"type": "text", "text": f"see {WEB}", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": WEB, "cache_control": {"type": "ephemeral"}},
        {"type": "thinking", "thinking": WEB},
    ],
    ids=str,
)
def test_data_and_words_are_not_references(part: dict[str, Any]) -> None:
    rules().apply(with_part(part), admin=False)


@pytest.mark.parametrize(
    ("url", "served"),
    [
        (WEB, True),
        ("HTTPS://PICTURES.EXAMPLE./a.png?b=c#d", True),
        ("http://pictures.example:8080/a", True),
        ("http://pictures.example", True),
        ("http://sub.pictures.example/a", False),
        ("http://pictures.example.evil/a", False),
        ("http://pictures.example@evil/a", False),
        ("http://evil/@pictures.example/", False),
        ("http://evil\\@pictures.example/", False),
        ("http://pictures.example\\@evil/", False),
        ("http://pictures.example /a", False),
        ("http://pictures.example\t.evil/a", False),
        ("http:pictures.example/a", False),
        ("http:///pictures.example/a", False),
        ("ftp://pictures.example/a", False),
        ("http://pictures.example/" + "a" * 9000, False),
    ],
)
def test_a_domain_is_the_whole_host(url: str, served: bool) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    held = rules("pictures.example")
    if served:
        held.apply(with_part(part), admin=False)
    else:
        with pytest.raises(BadRequest, match="allowed_media_domains"):
            held.apply(with_part(part), admin=False)
