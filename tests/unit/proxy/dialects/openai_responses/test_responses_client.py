"""The Responses API through the proxy, with OpenAI's own client."""

from __future__ import annotations

import openai
import pytest

from support.engines.mock_engine import MODEL, Answer, logprobs_of, render
from support.proxy.proxy_with_engine import ProxyWithEngine

TOOL = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_recorded_with_its_tokens(rig: ProxyWithEngine, stream: bool) -> None:
    say = Answer("It is fine.", [("look", '{"at": "it"}')], "Hm.")
    rig.engine.replies.append(say)
    asked = {"model": MODEL, "input": "How is it?", "instructions": "Be brief.", "tools": [TOOL]}
    if stream:
        with rig.client.responses.stream(**asked) as events:
            response = events.get_final_response()
    else:
        response = rig.client.responses.create(**asked)

    assert response.output_text == "It is fine."
    [call] = [item for item in response.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("look", '{"at": "it"}')
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is it?"},
    ]
    assert rig.engine.requests[0]["messages"] == messages
    [turn] = rig.turns()
    assert (turn.dialect, turn.untrainable, turn.finish_reason) == ("responses", None, "tool_calls")
    assert turn.prompt_token_ids.tolist() == render(messages, rig.engine.requests[0]["tools"])
    assert turn.completion_token_ids.tolist() == say.token_ids
    assert turn.completion_logprobs.tolist() == pytest.approx(logprobs_of(say.token_ids))
    assert turn.request["input"] == "How is it?"
    assert response.id == f"resp_{turn.turn_id}"


@pytest.mark.parametrize("stream", [False, True])
def test_truncation_is_taken_as_long_as_nothing_has_to_be_dropped(
    rig: ProxyWithEngine, stream: bool
) -> None:
    asked = {"model": MODEL, "input": "Hello", "truncation": "auto"}
    answer = rig.client.responses.create(**asked)
    assert answer.truncation == "auto"
    assert "truncation" not in rig.engine.requests[0]

    said = "This model's maximum context length is 100 tokens."
    rig.engine.failure = (400, {"error": {"message": said, "type": "x", "code": 400}}, {})
    with pytest.raises(openai.BadRequestError, match="is never truncated here") as caught:
        rig.client.responses.create(**asked, stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    assert said in caught.value.message
    assert [turn.untrainable for turn in rig.turns()] == [None, "over_length"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_came_before_need_not_be_sent_again(rig: ProxyWithEngine, stream: bool) -> None:
    rig.engine.replies += [Answer("One."), Answer("Two."), Answer("Three.")]
    first = rig.client.responses.create(model=MODEL, input="Count!", instructions="Be brief.")
    second = rig.client.responses.create(
        model=MODEL, input="Go on.", previous_response_id=first.id, instructions="Be quick."
    )
    asked = {"model": MODEL, "input": "And on.", "previous_response_id": second.id}
    if stream:
        with rig.client.responses.stream(**asked) as events:
            events.until_done()
    else:
        rig.client.responses.create(**asked)
    assert [(m["role"], m["content"]) for m in rig.engine.requests[2]["messages"]] == [
        ("user", "Count!"),
        ("assistant", "One."),
        ("user", "Go on."),
        ("assistant", "Two."),
        ("user", "And on."),
    ]
    assert rig.engine.requests[1]["messages"][0] == {"role": "system", "content": "Be quick."}
    assert len(rig.turns()) == 3


def test_a_response_belongs_to_the_rollout_of_the_one_before(rig: ProxyWithEngine) -> None:
    first = rig.client.responses.create(model=MODEL, input="Count!")
    with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="no name", max_retries=0) as nameless:
        nameless.responses.create(model=MODEL, input="Go on.", previous_response_id=first.id)
    assert len(rig.turns("r1")) == 2
    assert rig.turns("r1")[1].parent_id == rig.turns("r1")[0].turn_id


def test_an_unknown_response_is_not_found(rig: ProxyWithEngine) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        rig.client.responses.create(
            model=MODEL, input="Go on.", previous_response_id="resp_" + "0" * 32
        )
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"
    assert rig.engine.requests == []


def test_another_rollouts_response_is_not_found(rig: ProxyWithEngine) -> None:
    first = rig.client.responses.create(model=MODEL, input="A secret.")
    with (
        openai.OpenAI(base_url=f"{rig.url}/rollouts/r2/v1", api_key="none") as other,
        pytest.raises(openai.BadRequestError, match="not found"),
    ):
        other.responses.create(model=MODEL, input="Tell.", previous_response_id=first.id)


def test_instructions_and_developers_become_one_system_message(rig: ProxyWithEngine) -> None:
    first = rig.client.responses.create(
        model=MODEL,
        instructions="Be brief.",
        input=[{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
    )
    rig.client.responses.create(
        model=MODEL, instructions="Be quick.", input="On.", previous_response_id=first.id
    )
    systems = [
        [m["content"] for m in request["messages"] if m["role"] == "system"]
        for request in rig.engine.requests
    ]
    assert systems == [["Be brief.\n\nBe kind."], ["Be quick.\n\nBe kind."]]
    assert rig.turns()[1].fork_reason == "edited_history", "other instructions: another prompt"
