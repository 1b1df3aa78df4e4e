"""Answers as OpenAI's and Anthropic's libraries read them: whole, streamed, sync, async, raw."""

from __future__ import annotations

from typing import Any

import pytest

from support.engines.mock_engine import MODEL, Answer
from support.engines.prompt_driven_engine import PromptDrivenEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, assert_sampled
from support.proxy.vendor_calls import (
    CHAT,
    CHATTING,
    CLAUDE,
    MESSAGES,
    PROMPT,
    RESPONSES,
    VENDORS,
    Vendor,
)

ANSWER = f"Hello to you, who said: {PROMPT}"
THINK = "Think, then answer."


def saying(engine: PromptDrivenEngine, *contents: str) -> list[Answer]:
    """The engine's next replies."""
    says = [Answer(content) for content in contents]
    engine.replies.extend(says)
    return says


@pytest.mark.parametrize("vendor", VENDORS, ids=str)
def test_whole_and_streamed_answers_are_the_same(
    vendor: Vendor, rig: ProxyWithEngine, engine: PromptDrivenEngine
) -> None:
    say, *_ = saying(engine, *["Fine, thank you — très bien. 很好 🙂"] * 2)
    with vendor.client(rig) as client:
        whole = vendor.text(vendor.create(client)(**vendor.args))
        stream = vendor.create(client)(**vendor.args, stream=True)
        assert whole == "".join(map(vendor.delta, stream)) == say.content
    for turn in rig.turns():
        assert turn.dialect == vendor.name
        assert_sampled(turn, say)
    assert len(rig.turns()) == 2


@pytest.mark.parametrize("vendor", VENDORS, ids=str)
async def test_the_async_client_reads_the_same(
    vendor: Vendor, rig: ProxyWithEngine, engine: PromptDrivenEngine
) -> None:
    say, *_ = saying(engine, *["Fine, thank you."] * 2)
    async with vendor.async_client(rig) as client:
        whole = vendor.text(await vendor.create(client)(**vendor.args))
        stream = await vendor.create(client)(**vendor.args, stream=True)
        assert whole == "".join([vendor.delta(event) async for event in stream]) == say.content
    assert len(rig.turns()) == 2


@pytest.mark.parametrize("vendor", CHATTING, ids=str)
def test_raw_responses_have_what_the_parsed_ones_are_made_of(
    vendor: Vendor, rig: ProxyWithEngine
) -> None:
    with vendor.client(rig) as client:
        raw = vendor.create(_raw(client, "with_raw_response"))(**vendor.args)
        assert raw.status_code == 200
        assert raw.headers["content-type"] == "application/json"
        assert vendor.text(raw.parse()) == ANSWER
        with vendor.create(_raw(client, "with_streaming_response"))(
            **vendor.args, stream=True
        ) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = list(response.iter_lines())
    assert any(line.startswith("data: {") for line in lines)


def _raw(client: Any, view: str) -> Any:
    """The client, each of whose `create` methods is that of the view."""

    class Viewed:
        def __getattr__(self, name: str) -> Any:
            found = getattr(client, name)
            return getattr(found, view) if hasattr(found, "create") else _raw(found, view)

    return Viewed()


@pytest.mark.parametrize(
    ("vendor", "stream"),
    # OpenAI's helper for chat streams raises instead: see below.
    [(CHAT, False), (RESPONSES, False), (RESPONSES, True), (CLAUDE, False), (CLAUDE, True)],
    ids=str,
)
def test_a_limit_cuts_the_answer_and_is_told(
    vendor: Vendor, rig: ProxyWithEngine, stream: bool
) -> None:
    limit = {"chat": "max_completion_tokens", "responses": "max_output_tokens"}
    args = vendor.args | {limit.get(vendor.name, "max_tokens"): 5}
    with vendor.client(rig) as client:
        answer = vendor.streamed(client, args) if stream else vendor.create(client)(**args)
    assert vendor.text(answer) == "Hello"
    assert _ending(answer) in ("length", "max_output_tokens", "max_tokens")
    [turn] = rig.turns()
    assert turn.finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("vendor", CHATTING, ids=str)
def test_a_stop_string_ends_the_answer(vendor: Vendor, rig: ProxyWithEngine, stream: bool) -> None:
    stops: dict[str, Any] = {
        "chat": {"stop": [",", "!"]},
        "responses": {"extra_body": {"stop": [",", "!"]}},  # vLLM's; OpenAI has none here
        "messages": {"stop_sequences": [",", "!"]},
    }
    args = vendor.args | stops[vendor.name]
    with vendor.client(rig) as client:
        answer = vendor.streamed(client, args) if stream else vendor.create(client)(**args)
    assert vendor.text(answer) == "Hello to you"
    assert _ending(answer) in ("stop", "completed", "stop_sequence")
    if vendor is CLAUDE:
        assert answer.stop_sequence == ","
    [turn] = rig.turns()
    assert turn.finish_reason == "stop"


def _ending(answer: Any) -> str | None:
    """Why the answer ended, in its dialect's words."""
    if hasattr(answer, "choices"):
        return answer.choices[0].finish_reason
    if hasattr(answer, "output"):
        details = answer.incomplete_details
        return details.reason if details else answer.status
    return answer.stop_reason


async def test_openais_chat_helper_tells_what_happens(
    rig: ProxyWithEngine, engine: PromptDrivenEngine
) -> None:
    engine.replies += [Answer("One"), Answer("Two and more")]
    args = {"model": MODEL, "messages": MESSAGES, "n": 2}
    async with (
        CHAT.async_client(rig) as client,
        client.chat.completions.stream(**args, stream_options={"include_usage": True}) as stream,
    ):
        kinds = [event.type async for event in stream if event.type != "chunk"]
        completion = await stream.get_final_completion()
    assert kinds.count("content.done") == 2
    assert set(kinds) == {"content.delta", "content.done"}
    assert [each.message.content for each in completion.choices] == ["One", "Two and more"]
    assert completion.usage.completion_tokens == 4 + 13
    assert len(rig.turns()) == 2


async def test_openais_responses_helper_tells_what_happens(
    rig: ProxyWithEngine, engine: PromptDrivenEngine
) -> None:
    engine.replies.append(Answer("I look.", [("look", '{"at": "it"}')], "Hm."))
    tool = {"type": "function", "name": "look", "parameters": {}, "strict": False}
    async with (
        RESPONSES.async_client(rig) as client,
        client.responses.stream(**RESPONSES.args, tools=[tool]) as stream,
    ):
        events = [event async for event in stream]
        response = await stream.get_final_response()
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    told = {event.type: event for event in events}
    assert told["response.reasoning_text.done"].text == "Hm."
    assert told["response.output_text.done"].text == "I look."
    assert told["response.function_call_arguments.done"].arguments == '{"at": "it"}'
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_anthropics_helper_tells_what_happens(
    rig: ProxyWithEngine, engine: PromptDrivenEngine
) -> None:
    engine.replies.append(Answer("I look.", [("look", '{"at": "it"}')], "Hm."))
    tool = {"name": "look", "input_schema": {"type": "object"}}
    async with (
        CLAUDE.async_client(rig) as client,
        client.messages.stream(**CLAUDE.args, tools=[tool]) as stream,
    ):
        events = [event async for event in stream]
        message = await stream.get_final_message()
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert {"thinking", "text", "input_json", "content_block_stop"} <= set(kinds)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[0].thinking == "Hm."
    assert message.content[2].input == {"at": "it"}


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_shown_in_each_dialects_own_place(rig: ProxyWithEngine, stream: bool) -> None:
    chat, responses, claude = (
        _thought(vendor, rig, stream) for vendor in (CHAT, RESPONSES, CLAUDE)
    )
    assert chat.choices[0].message.reasoning == "Let me see."
    assert responses.output[0].content[0].text == "Let me see."
    assert responses.usage.output_tokens_details.reasoning_tokens == len("Let me see.")
    assert claude.content[0].thinking == "Let me see."
    assert claude.content[0].signature
    assert all(turn.response["choices"][0]["message"]["reasoning"] for turn in rig.turns())


def _thought(vendor: Vendor, rig: ProxyWithEngine, stream: bool) -> Any:
    asked = {"input": THINK} if vendor is RESPONSES else {"messages": _user(THINK)}
    with vendor.client(rig) as client:
        args = vendor.args | asked
        return vendor.streamed(client, args) if stream else vendor.create(client)(**args)


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_reasoning_can_be_turned_off(rig: ProxyWithEngine, engine: PromptDrivenEngine) -> None:
    with CHAT.client(rig) as gpt, CLAUDE.client(rig) as claude:
        args = CHAT.args | {"messages": _user(THINK)}
        answers = [
            gpt.chat.completions.create(**args, reasoning_effort="none").choices[0].message,
            gpt.responses.create(model=MODEL, input=THINK, reasoning={"effort": "none"}),
            claude.messages.create(
                **CLAUDE.args | {"messages": _user(THINK)}, thinking={"type": "disabled"}
            ),
        ]
    assert [request["reasoning_effort"] for request in engine.requests] == ["none"] * 3
    assert all("Let me see" not in answer.model_dump_json() for answer in answers)


PIXEL = "iVBORw0KGgo="
AS_DATA = f"data:image/png;base64,{PIXEL}"
PICTURES: dict[str, Any] = {
    "chat": {
        "messages": _user(
            [{"type": "text", "text": PROMPT}, {"type": "image_url", "image_url": {"url": AS_DATA}}]
        )
    },
    "responses": {
        "input": _user(
            [
                {"type": "input_text", "text": PROMPT},
                {"type": "input_image", "image_url": AS_DATA, "detail": "auto"},
            ]
        )
    },
    "messages": {
        "messages": _user(
            [
                {"type": "text", "text": PROMPT},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": PIXEL},
                },
            ]
        )
    },
}


@pytest.mark.parametrize("vendor", CHATTING, ids=str)
def test_a_picture_reaches_the_engine_and_its_turn_is_kept_untrained(
    vendor: Vendor, rig: ProxyWithEngine, engine: PromptDrivenEngine
) -> None:
    with vendor.client(rig) as client:
        answer = vendor.create(client)(**vendor.args | PICTURES[vendor.name])
    assert vendor.text(answer) == f"{ANSWER}\n<image_url>"
    [message] = engine.requests[0]["messages"]
    text, picture = message["content"]
    assert text == {"type": "text", "text": PROMPT}
    assert picture["image_url"]["url"] == AS_DATA
    [turn] = rig.turns()
    assert turn.untrainable == "media"
    assert len(turn.completion_token_ids) > 0


def test_usage_tells_what_was_in_the_prefix_cache(rig: ProxyWithEngine) -> None:
    long = "Remember all of this. " * 10
    with CHAT.client(rig) as gpt, CLAUDE.client(rig) as claude:
        args = CHAT.args | {"messages": _user(long)}
        first = gpt.chat.completions.create(**args).usage
        again = gpt.chat.completions.create(**args).usage
        response = gpt.responses.create(model=MODEL, input=long).usage
        message = claude.messages.create(**CLAUDE.args | {"messages": _user(long)}).usage
    assert first.prompt_tokens_details.cached_tokens == 0
    cached = again.prompt_tokens_details.cached_tokens
    assert 0 < cached < again.prompt_tokens
    assert response.input_tokens_details.cached_tokens == cached
    assert message.cache_read_input_tokens == cached
    assert message.input_tokens == first.prompt_tokens - cached
