"""Anthropic's Messages API through the proxy, with its own client."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import anthropic
import pytest

from support.engines.mock_engine import MODEL, Answer, MockEngine, logprobs_of, render
from tracegrad.events import Turn

Turns = Callable[..., list[Turn]]

HELLO = [{"role": "user", "content": "How is it?"}]
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def claude(proxy: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=f"{proxy}/rollouts/r1", api_key="any", max_retries=0
    ) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_is_recorded_with_its_tokens(
    engine: MockEngine, claude: anthropic.Anthropic, turns: Turns, stream: bool
) -> None:
    say = Answer("It is fine.", [("look", '{"at": "it"}')], "Hm.")
    engine.replies.append(say)
    asked = {"model": MODEL, "max_tokens": 99, "system": "Be brief.", "messages": HELLO}
    if stream:
        with claude.messages.stream(**asked, tools=[TOOL]) as events:
            message = events.get_final_message()
    else:
        message = claude.messages.create(**asked, tools=[TOOL])

    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].id.startswith("toolu_")
    assert message.content[1].text == "It is fine."
    assert (message.content[2].name, message.content[2].input) == ("look", {"at": "it"})
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == len(say.token_ids)
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert engine.requests[0]["messages"] == messages
    [turn] = turns()
    assert (turn.dialect, turn.untrainable, turn.finish_reason) == ("messages", None, "tool_calls")
    assert turn.prompt_token_ids.tolist() == render(messages, engine.requests[0]["tools"])
    assert turn.completion_token_ids.tolist() == say.token_ids
    assert turn.completion_logprobs.tolist() == pytest.approx(logprobs_of(say.token_ids))
    assert turn.request["system"] == "Be brief."
    assert message.id == f"msg_{turn.turn_id}"


def test_tokens_are_counted_by_the_engine(
    engine: MockEngine, claude: anthropic.Anthropic, turns: Turns
) -> None:
    count = claude.messages.count_tokens(model=MODEL, system="Be brief.", messages=HELLO)
    assert count.input_tokens == len(render([{"role": "system", "content": "Be brief."}, *HELLO]))
    assert turns() == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_overlong_prompt_is_refused_and_recorded(
    engine: MockEngine, claude: anthropic.Anthropic, turns: Turns, stream: bool
) -> None:
    said = (
        "This model's maximum context length is 100 tokens. However, your prompt contains 200 "
        "input tokens, which exceeds this limit even without any output tokens."
    )
    engine.failure = (400, {"error": {"message": said, "type": "BadRequestError", "code": 400}}, {})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(model=MODEL, max_tokens=9, messages=HELLO, stream=stream)
    [turn] = turns()
    assert (turn.untrainable, len(turn.completion_token_ids)) == ("over_length", 0)
