"""Google's Gemini API through the proxy, with its own client."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from google import genai
from google.genai import errors, types

from support.engines.mock_engine import MODEL, Answer, MockEngine, logprobs_of, render
from tracegrad.events import Turn

Turns = Callable[..., list[Turn]]

LOOK = types.FunctionDeclaration(
    name="look", parameters_json_schema={"type": "object", "properties": {}}
)
ASKED = types.GenerateContentConfig(
    system_instruction="Be brief.", tools=[types.Tool(function_declarations=[LOOK])]
)


@pytest.fixture(params=["v1", "v1beta"])
def google(proxy: str, request: pytest.FixtureRequest) -> Iterator[genai.Client]:
    options = types.HttpOptions(base_url=f"{proxy}/rollouts/r1", api_version=request.param)
    with genai.Client(api_key="any", http_options=options) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_contents_are_recorded_with_their_tokens(
    engine: MockEngine, google: genai.Client, turns: Turns, stream: bool
) -> None:
    say = Answer("It is fine.", [("look", '{"at": "it"}')])
    engine.replies.append(say)
    asked = {"model": MODEL, "contents": "How is it?", "config": ASKED}
    if stream:
        parts = [p for c in google.models.generate_content_stream(**asked) for p in c.parts or ()]
    else:
        parts = google.models.generate_content(**asked).parts
    assert "".join(part.text or "" for part in parts) == "It is fine."
    [call] = [part.function_call for part in parts if part.function_call]
    assert (call.name, call.args) == ("look", {"at": "it"})
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is it?"},
    ]
    assert engine.requests[0]["messages"] == messages
    [turn] = turns()
    assert (turn.dialect, turn.model, turn.untrainable) == ("gemini", MODEL, None)
    assert turn.prompt_token_ids.tolist() == render(messages, engine.requests[0]["tools"])
    assert turn.completion_token_ids.tolist() == say.token_ids
    assert turn.completion_logprobs.tolist() == pytest.approx(logprobs_of(say.token_ids))


def test_a_chat_goes_on(engine: MockEngine, google: genai.Client, turns: Turns) -> None:
    engine.replies += [Answer("One."), Answer("Two.")]
    chat = google.chats.create(model=MODEL)
    chat.send_message("Count!")
    assert chat.send_message("Go on.").text == "Two."
    first, second = turns()
    assert second.parent_id == first.turn_id


def test_tokens_are_counted_by_the_engine(google: genai.Client, turns: Turns) -> None:
    count = google.models.count_tokens(model=MODEL, contents="How is it?")
    assert count.total_tokens == len(render([{"role": "user", "content": "How is it?"}]))
    assert turns() == []


def test_errors_have_googles_shape(engine: MockEngine, google: genai.Client) -> None:
    engine.failure = (429, {"error": {"message": "too many", "type": "x", "code": 429}}, {})
    with pytest.raises(errors.ClientError) as caught:
        google.models.generate_content(model=MODEL, contents="How is it?")
    assert (caught.value.code, caught.value.status) == (429, "RESOURCE_EXHAUSTED")
    assert caught.value.message == "too many"


def test_another_method_is_not_found(google: genai.Client) -> None:
    with pytest.raises(errors.ClientError) as caught:
        google.models.embed_content(model=MODEL, contents="How is it?")
    assert caught.value.code == 404
