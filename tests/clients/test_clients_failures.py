"""What goes wrong, as the vendors' libraries tell it to an agent: by their own exceptions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from support.engines.mock_engine import Answer, error
from support.engines.prompt_driven_engine import PromptDrivenEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, assert_sampled, proxy_with_engine
from support.proxy.servers import EngineServer, eventually
from support.proxy.vendor_calls import CHAT, CHATTING, CLAUDE, Vendor

STATUSES = (400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 502, 503, 504, 529)
STORY = Answer("a long story that nobody wants to hear to its end")


@pytest.fixture(scope="module")
def lasting(
    engine_server: EngineServer, new_store: Callable[[], Path]
) -> Iterator[ProxyWithEngine]:
    """For calls that leave nothing behind."""
    with proxy_with_engine(engine_server, PromptDrivenEngine(), new_store(), max_body_mib=1) as rig:
        yield rig


@pytest.fixture
def refusing(lasting: ProxyWithEngine, engine_server: EngineServer) -> Iterator[ProxyWithEngine]:
    engine_server.engine = lasting.engine
    lasting.engine.failure = None
    yield lasting
    assert lasting.all_turns() == [], "nothing was sampled"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("vendor", CHATTING, ids=str)
def test_an_engines_refusal_is_the_librarys_own_exception(
    vendor: Vendor, refusing: ProxyWithEngine, status: int, stream: bool
) -> None:
    refusing.engine.failure = (status, error("not like this", status, "SomeError"), {})
    with vendor.client(refusing) as client, pytest.raises(vendor.error(status)) as caught:
        vendor.create(client)(**vendor.args, stream=stream)
    assert type(caught.value) is vendor.error(status)
    assert caught.value.status_code == status
    assert "not like this" in caught.value.message
    told = caught.value.body
    assert isinstance(told, dict)
    if vendor is CLAUDE:
        assert told["type"] == "error"
        assert caught.value.type is not None
    retry_after = caught.value.response.headers.get("retry-after")
    assert retry_after == ("1" if status in (429, 503, 529) else None)


@pytest.mark.parametrize("vendor", CHATTING, ids=str)
def test_a_refusal_that_is_no_json_is_told_all_the_same(
    vendor: Vendor, refusing: ProxyWithEngine
) -> None:
    refusing.engine.failure = (502, ["no such gateway"], {"retry-after": "9"})  # type: ignore[assignment]
    with vendor.client(refusing) as client, pytest.raises(vendor.error(502)) as caught:
        vendor.create(client)(**vendor.args)
    assert "no such gateway" in caught.value.message
    assert caught.value.response.headers["retry-after"] == "9"


@pytest.mark.parametrize("vendor", CHATTING, ids=str)
def test_a_body_that_is_too_large_is_a_413(vendor: Vendor, refusing: ProxyWithEngine) -> None:
    with vendor.client(refusing) as client, pytest.raises(vendor.error(413)) as caught:
        vendor.create(client)(**vendor.args, extra_body={"user": "x" * (1 << 20)})
    assert caught.value.status_code == 413
    assert "larger than 1 MiB" in caught.value.message


@pytest.mark.parametrize("vendor", CHATTING, ids=str)
async def test_a_field_of_the_wrong_type_is_a_400_that_names_it(
    vendor: Vendor, refusing: ProxyWithEngine
) -> None:
    async with vendor.async_client(refusing) as client:
        with pytest.raises(vendor.error(400), match="temperature"):
            await vendor.create(client)(**vendor.args, extra_body={"temperature": "hot"})


@pytest.mark.parametrize("vendor", CHATTING, ids=str)
def test_what_is_not_served_is_a_404(vendor: Vendor, refusing: ProxyWithEngine) -> None:
    with vendor.client(refusing) as client, pytest.raises(vendor.error(404)):
        client.post("/v1/nothing", body={}, cast_to=object)


@pytest.mark.parametrize("vendor", CHATTING, ids=str)
def test_a_refused_call_is_sent_again_and_is_one_turn(
    vendor: Vendor, rig: ProxyWithEngine, engine: PromptDrivenEngine
) -> None:
    for status in (503, 429):
        engine.refusals.append((status, error("busy", status), {"retry-after": "0.01"}))
    with vendor.client(rig) as client:
        patient = client.with_options(max_retries=2)
        answer = vendor.create(patient)(**vendor.args)
        assert vendor.text(answer)
        engine.refusals.append((503, error("busy", 503), {}))
        with pytest.raises(vendor.error(503)):
            vendor.create(client.with_options(max_retries=0))(**vendor.args)
    assert len(engine.requests) == 3 + 1
    [turn] = rig.turns()
    assert_sampled(turn, engine.said[0])


@pytest.mark.parametrize("vendor", CHATTING, ids=str)
def test_a_429_that_stays_is_the_librarys_rate_limit_error(
    vendor: Vendor, rig: ProxyWithEngine, engine: PromptDrivenEngine
) -> None:
    for _ in range(2):
        engine.refusals.append((429, error("busy", 429), {"retry-after": "0.01"}))
    with (
        vendor.client(rig, max_retries=1) as client,
        pytest.raises(vendor.error(429)) as caught,
    ):
        vendor.create(client)(**vendor.args)
    assert caught.value.response.headers["retry-after"] == "0.01"
    assert len(engine.requests) == 2
    assert rig.turns() == []


@pytest.mark.parametrize("vendor", CHATTING, ids=str)
@pytest.mark.parametrize("how", ["breaks off", "reports an error"])
def test_a_stream_that_fails_midway_raises_after_what_came(
    vendor: Vendor, rig: ProxyWithEngine, engine: PromptDrivenEngine, how: str
) -> None:
    engine.replies.extend([STORY, STORY])
    if how == "breaks off":
        engine.break_at, times = 3, 2  # the one that goes on breaks off too
    else:
        engine.error_at, times = 3, 1
    heard: list[str] = []
    with vendor.client(rig) as client:
        stream = vendor.create(client)(**vendor.args, stream=True)
        with pytest.raises(vendor.library.APIError):
            heard.extend(_until_it_fails(vendor, stream))
    assert "".join(heard) == STORY.content[:12] * times
    [turn] = rig.turns()
    assert turn.untrainable == "aborted"
    assert turn.completion_token_ids.tolist() == STORY.token_ids[:12] * times


@pytest.mark.parametrize("vendor", CHATTING, ids=str)
def test_a_stream_whose_engine_dies_goes_on(
    vendor: Vendor, rig: ProxyWithEngine, engine: PromptDrivenEngine
) -> None:
    rest = Answer(" that ends well")
    engine.replies.extend([STORY, rest])
    engine.break_at, engine.faults_left = 3, 1
    with vendor.client(rig) as client:
        heard = list(_until_it_fails(vendor, vendor.create(client)(**vendor.args, stream=True)))
    assert "".join(heard) == STORY.content[:12] + rest.content
    [turn] = rig.turns()
    assert turn.untrainable is None
    assert turn.completion_token_ids.tolist() == STORY.token_ids[:12] + rest.token_ids


def _until_it_fails(vendor: Vendor, stream: Any) -> Iterator[str]:
    """Responses tells a failure by an event, the others by an exception of the library."""
    for event in stream:
        yield vendor.delta(event)
        if getattr(event, "type", None) == "response.failed":
            assert event.response.status == "failed"
            raise openai.APIError(event.response.error.message, None, body=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("vendor", CHATTING, ids=str)
def test_a_client_that_loses_patience_stops_the_engine(
    vendor: Vendor, rig: ProxyWithEngine, engine: PromptDrivenEngine, stream: bool
) -> None:
    engine.replies.append(STORY)
    engine.wait_before(2 if stream else 0)
    for patience in (1.0, 5.0, 25.0):
        # In the middle of a stream the libraries let the HTTP library's own exception through.
        gives_up = pytest.raises((vendor.library.APITimeoutError, httpx2.ReadTimeout))
        with vendor.client(rig, timeout=patience) as client, gives_up:
            list(vendor.create(client)(**vendor.args, stream=stream))
        if engine.requests:  # on a busy machine it may give up before it is heard
            break
    eventually(lambda: engine.aborted)
    turn = eventually(rig.turns)[-1]
    assert turn.untrainable == "aborted"
    assert turn.completion_token_ids.tolist() == (STORY.token_ids[:8] if stream else [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("vendor", CHATTING, ids=str)
async def test_a_cancelled_task_stops_the_engine_and_its_turn_is_kept(
    vendor: Vendor, rig: ProxyWithEngine, engine: PromptDrivenEngine, stream: bool
) -> None:
    engine.replies += [STORY, Answer("for the neighbour")]
    engine.wait_before(3 if stream else 0)
    heard: list[str] = []

    async def agent(client: Any) -> None:
        answer = await vendor.create(client)(**vendor.args, stream=stream)
        async for event in answer:
            heard.append(vendor.delta(event))

    async with vendor.async_client(rig) as client:
        task = asyncio.create_task(agent(client))
        deadline = time.monotonic() + 60
        while not (("".join(heard) == STORY.content[:12]) if stream else engine.requests):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(eventually, lambda: engine.aborted)
        [turn] = await asyncio.to_thread(eventually, rig.turns)
        engine.wait_before(3 if stream else 0).set()
        again = await vendor.create(client)(**vendor.args)
    assert engine.aborted == 1
    assert turn.untrainable == "aborted"
    assert turn.finish_reason is None
    assert turn.completion_token_ids.tolist() == (STORY.token_ids[:12] if stream else [])
    assert vendor.text(again) == "for the neighbour"
    assert [each.untrainable for each in rig.turns()] == ["aborted", None]


@pytest.mark.parametrize("vendor", CHATTING, ids=str)
async def test_many_at_once_each_get_their_own(
    vendor: Vendor, rig: ProxyWithEngine, engine: PromptDrivenEngine
) -> None:
    async with vendor.async_client(rig) as client:

        async def ask(number: int) -> str:
            said = [{"role": "user", "content": f"call {number}"}]
            name = "input" if vendor.name == "responses" else "messages"
            if number % 2:
                return vendor.text(await vendor.create(client)(**vendor.args | {name: said}))
            stream = await vendor.create(client)(**vendor.args | {name: said, "stream": True})
            return "".join([vendor.delta(event) async for event in stream])

        texts = await asyncio.gather(*(ask(number) for number in range(24)))
    assert [text.rpartition(" ")[2] for text in texts] == [str(n) for n in range(24)]
    assert len(rig.turns()) == 24


def test_both_libraries_exceptions_are_told_apart() -> None:
    """What the statuses above are mapped to; the libraries' own names."""
    assert CHAT.error(404) is openai.NotFoundError
    assert CHAT.error(413) is openai.APIStatusError
    assert CHAT.error(503) is openai.InternalServerError
    assert CLAUDE.error(413) is anthropic.RequestTooLargeError
    assert CLAUDE.error(529) is anthropic.OverloadedError
