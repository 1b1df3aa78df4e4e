"""Bodies that are wrong in every way: refused in the dialect's own shape, at once, and nobody
else notices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.proxy.corrupted_bodies import corrupted
from support.proxy.full_bodies import FULL
from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.raw_calls import CHAT, READ, RawCall, openai_refusal

PATIENCE_S = 60.0
# The fixtures serve all examples of a test; what is sent must be the same in every run.
SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def http(patient: ProxyWithEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=patient.url, timeout=PATIENCE_S) as client:
        yield client


def post(http: httpx.Client, call: RawCall, content: bytes) -> httpx.Response:
    return http.post(call.path, content=content, headers={"content-type": "application/json"})


def assert_refused(call: RawCall, answer: httpx.Response) -> str:
    """A 4xx in the shape of the route's dialect; what it says."""
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["content-type"] == "application/json"
    refusal = call.refusal(answer.content)
    assert refusal.message
    return refusal.message


def with_field(call: RawCall, field: str) -> bytes:
    """The body with one more field, given as JSON text that Python would not write."""
    return json.dumps(call.body).encode()[:-1] + b", " + field.encode() + b"}"


NO_JSON: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda body: b"",
    "blanks": lambda body: b" \n\t",
    "null": lambda body: b"null",
    "a number": lambda body: b"1",
    "a text": lambda body: b'"messages"',
    "a list": lambda body: b"[" + body + b"]",
    "two objects": lambda body: body + body,
    "a trailing comma": lambda body: body[:-1] + b",}",
    "single quotes": lambda body: body.replace(b'"', b"'"),
    "a comment": lambda body: b"// really\n" + body,
    "no number": lambda body: body[:-1] + b', "temperature": NaN}',
    "infinity": lambda body: body[:-1] + b', "temperature": -Infinity}',
    "half a surrogate": lambda body: body[:-1] + b', "user": "\\ud800"}',
    "a control character": lambda body: body[:-1] + b', "user": "\x01"}',
    "another encoding": lambda body: body.decode().encode("utf-16"),
    "latin-1": lambda body: body[:-1] + b', "user": "\xe9"}',
    "an overlong encoding": lambda body: body[:-1] + b', "user": "\xc0\xaf"}',
    "a form": lambda body: b"messages=hello&model=m",
    "compressed": lambda body: b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff",
    "1,100 lists in each other": lambda body: body[:-1] + nested(1100) + b"}",
    "100,000 lists in each other": lambda body: body[:-1] + nested(100_000) + b"}",
    "no end to the lists": lambda body: body[:-1] + b', "user": ' + b"[" * 100_000,
}


def nested(depth: int) -> bytes:
    return b', "user": ' + b"[" * depth + b"]" * depth


@pytest.mark.parametrize("wrong", NO_JSON.values(), ids=NO_JSON)
@pytest.mark.parametrize("call", READ, ids=str)
def test_what_is_no_json_object_is_refused(
    http: httpx.Client, call: RawCall, wrong: Callable[[bytes], bytes]
) -> None:
    answer = post(http, call, wrong(json.dumps(call.body).encode()))
    assert answer.status_code == 400
    assert "the body" in assert_refused(call, answer)


@pytest.mark.parametrize("call", READ, ids=str)
@settings(SETTINGS, max_examples=15)
@given(data=st.data())
def test_a_body_that_is_cut_anywhere_is_refused(
    http: httpx.Client, call: RawCall, data: st.DataObject
) -> None:
    body = json.dumps(FULL[call.name]).encode()
    cut = data.draw(st.integers(1, len(body) - 1))
    assert_refused(call, post(http, call, body[:cut]))


@pytest.mark.parametrize("call", READ, ids=str)
@settings(SETTINGS, max_examples=15)
@given(data=st.data())
def test_a_body_with_bytes_that_are_no_utf_8_is_refused(
    http: httpx.Client, call: RawCall, data: st.DataObject
) -> None:
    body = json.dumps(FULL[call.name]).encode()
    at = data.draw(st.integers(0, len(body)))
    odd = data.draw(st.sampled_from([b"\xff", b"\x80", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80"]))
    assert_refused(call, post(http, call, body[:at] + odd + body[at:]))


@pytest.mark.parametrize("call", READ, ids=str)
@settings(SETTINGS, max_examples=40)
@given(data=st.data())
def test_a_mangled_body_is_served_or_refused(
    http: httpx.Client, call: RawCall, data: st.DataObject
) -> None:
    """The engine takes everything: what is not a 200 is the proxy's own refusal."""
    body = data.draw(corrupted([FULL[call.name], call.body]))
    answer = post(http, call, json.dumps(body).encode())
    if answer.status_code != 200:
        assert_refused(call, answer)


@pytest.mark.slow
@pytest.mark.parametrize("call", READ, ids=str)
@settings(SETTINGS, max_examples=1500)
@given(data=st.data())
def test_many_mangled_bodies_are_served_or_refused(
    http: httpx.Client, call: RawCall, data: st.DataObject
) -> None:
    body = data.draw(corrupted([FULL[call.name], call.body, {**FULL[call.name], "stream": True}]))
    answer = post(http, call, json.dumps(body).encode())
    if answer.status_code != 200:
        assert_refused(call, answer)


HUGE = ["1e999", "-1e999", "9" * 400, "1e308", str(2**64), "-" + str(2**63 + 1), "0.0000001e-400"]
# A number of each dialect's that the proxy relies on.
NUMBERS = {
    "chat": "n",
    "completions": "n",
    "responses": "max_output_tokens",
    "messages": "max_tokens",
}


@pytest.mark.parametrize("number", HUGE, ids=lambda number: number[:12])
@pytest.mark.parametrize("call", [call for call in READ if call.name in NUMBERS], ids=str)
def test_a_huge_number_is_refused(http: httpx.Client, call: RawCall, number: str) -> None:
    assert_refused(call, post(http, call, with_field(call, f'"{NUMBERS[call.name]}": {number}')))


@pytest.mark.parametrize("depth", [200, 250, 256, 300, 1000])
@pytest.mark.parametrize("call", READ, ids=str)
def test_deep_nesting_is_served_or_refused(http: httpx.Client, call: RawCall, depth: int) -> None:
    nest = '{"a":' * depth + "0" + "}" * depth
    for field in ("metadata", "tools", "labels"):
        answer = post(http, call, with_field(call, f'"{field}": {nest}'))
        if answer.status_code != 200:
            assert_refused(call, answer)


USER = {"role": "user", "content": "hi"}
PART = {"role": "user", "content": [{"type": [], "text": "a"}]}
# Of chat completions, what the proxy itself has to read; the other dialects' tests have theirs.
WRONG: dict[str, list[Any]] = {
    "tools": ["x", 1, True, {}, [None], [1], ["x"], [{"function": 1}], [{"function": {}}], [{}]],
    "chat_template_kwargs": ["x", 1, True, [], ["ab"], [["a", 1]]],
    "messages": ["x", {}, 1, [], [None], [[USER]], [{}], [{"role": 1}], [USER, PART]],
    "stream": ["yes", 0, [], {}],
    "stream_options": ["yes", 1, [], True],
    "n": ["1", 1.5, True, [], 0, -1],
    "logprobs": ["yes", 1, []],
    "model": [1, [], {}, True],
    "temperature": ["1", True, [], {}],
}


@pytest.mark.parametrize(("name", "wrong"), [(n, w) for n, each in WRONG.items() for w in each])
def test_a_field_of_the_wrong_type_is_named(http: httpx.Client, name: str, wrong: object) -> None:
    answer = post(http, CHAT, json.dumps({**CHAT.body, name: wrong}).encode())
    assert name in assert_refused(CHAT, answer)


EVENT = {"type": "reward", "rollout_id": "r1", "value": 1.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"turn": 2**63},
        {"turn": -(10**30)},
        {"value": "much"},
        {"created_at": -1},
        {"type": "other"},
    ],
    ids=str,
)
def test_an_event_that_cannot_be_stored_is_refused_and_nothing_with_it(
    http: httpx.Client, patient: ProxyWithEngine, wrong: dict[str, Any]
) -> None:
    whole = {**EVENT, "reward_id": "whole"}
    answer = http.post("/api/events", json={"events": [whole, {**EVENT, **wrong}]})
    assert answer.status_code == 422
    assert openai_refusal(answer.content).message
    assert patient.store.rewards("r1") == []


STRICT = [call for call in READ if call.name not in ("chat", "completions")]


@pytest.mark.parametrize("call", STRICT, ids=str)
def test_an_unknown_field_is_refused_by_name(http: httpx.Client, call: RawCall) -> None:
    """As these vendors do; of chat and text completions the engine knows all the fields."""
    message = assert_refused(call, post(http, call, with_field(call, '"temperatura": 1')))
    assert "temperatura" in message


@pytest.mark.parametrize("name", ["temperature", "n", "stream", "tools", "messages"])
def test_a_field_that_is_there_twice_is_read_once(http: httpx.Client, name: str) -> None:
    """JSON leaves it open which one counts: the last does here, wrong or not."""
    answer = post(http, CHAT, with_field(CHAT, f'"{name}": null, "{name}": {{}}'))
    assert name in assert_refused(CHAT, answer)


METHODS = ("GET", "PUT", "PATCH", "DELETE", "OPTIONS")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("call", READ, ids=str)
def test_another_method_is_a_405_in_the_dialects_shape(
    http: httpx.Client, call: RawCall, method: str
) -> None:
    answer = http.request(method, call.path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert_refused(call, answer)


@pytest.mark.parametrize("rest", ["/nothing", "x"])
@pytest.mark.parametrize("call", READ, ids=str)
def test_a_path_beside_a_route_is_a_404_in_the_dialects_shape(
    http: httpx.Client, call: RawCall, rest: str
) -> None:
    answer = http.post(f"{call.path}{rest}", json=call.body)
    assert answer.status_code == 404
    assert_refused(call, answer)
