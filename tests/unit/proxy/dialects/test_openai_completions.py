"""Text completions and embeddings through the proxy, with OpenAI's own client."""

from __future__ import annotations

import pytest

from support.engines.mock_engine import MODEL, Answer, logprobs_of
from support.proxy.proxy_with_engine import ProxyWithEngine

PATH = "/rollouts/r1/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_recorded_and_stripped(rig: ProxyWithEngine, stream: bool) -> None:
    say = Answer(" upon a time")
    rig.engine.replies.append(say)
    answer = rig.client.completions.create(model=MODEL, prompt="Once", stream=stream, max_tokens=9)
    parts = list(answer) if stream else [answer]

    assert "".join(part.choices[0].text for part in parts) == " upon a time"
    assert parts[-1].choices[0].finish_reason == "stop"
    assert all("token_ids" not in part.model_dump_json() for part in parts)
    assert all(part.choices[0].logprobs is None for part in parts)
    assert rig.engine.requests[0]["logprobs"] == 0, "the sampled tokens' own and no others"
    [turn] = rig.turns()
    assert (turn.dialect, turn.untrainable) == ("completions", None)
    assert turn.prompt_token_ids.tolist() == list(b"Once")
    assert turn.completion_token_ids.tolist() == say.token_ids
    assert turn.completion_logprobs.tolist() == logprobs_of(say.token_ids)
    assert turn.request["prompt"] == "Once"
    assert turn.response["choices"][0]["message"]["content"] == " upon a time"


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_that_asks_for_ids_and_logprobs_gets_them(
    rig: ProxyWithEngine, stream: bool
) -> None:
    body = {"prompt": "Once", "logprobs": 1, "return_token_ids": True, "stream": stream}
    text = rig.http.post(PATH, json=body).text
    assert '"token_logprobs":[-0.125' in text
    assert '"token_ids":[111,107,256]' in text
    assert rig.engine.requests[0]["logprobs"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [["a", "b"], [[97], [98]]])
def test_each_prompt_of_a_list_is_its_own_turn(
    rig: ProxyWithEngine, prompt: object, stream: bool
) -> None:
    rig.engine.replies += [Answer("one"), Answer("two"), Answer("three"), Answer("four")]
    answer = rig.client.completions.create(model=MODEL, prompt=prompt, n=2, stream=stream)
    if stream:
        list(answer)
    got = [
        (t.prompt_token_ids.tolist(), bytes(t.completion_token_ids.tolist()[:-1]))
        for t in rig.turns()
    ]
    assert got == [([97], b"one"), ([97], b"two"), ([98], b"three"), ([98], b"four")]


def test_a_text_that_goes_on_is_a_child(rig: ProxyWithEngine) -> None:
    rig.engine.replies += [Answer(" upon", cut=True), Answer(" a time")]
    rig.client.completions.create(model=MODEL, prompt="Once")
    rig.client.completions.create(model=MODEL, prompt="Once upon")
    first, second = rig.turns()
    assert second.parent_id == first.turn_id


def test_an_echo_is_kept_and_never_trained(rig: ProxyWithEngine) -> None:
    assert rig.http.post(PATH, json={"prompt": "Once", "echo": True}).status_code == 200
    assert rig.turns()[0].untrainable == "echo"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "kv_transfer_params": {}}, "kv_transfer_params"),
    ],
)
def test_a_wrong_field_is_named(rig: ProxyWithEngine, body: dict[str, object], param: str) -> None:
    answer = rig.http.post(PATH, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert rig.engine.requests == []


def test_embeddings_are_the_engines(rig: ProxyWithEngine) -> None:
    answer = rig.client.embeddings.create(model=MODEL, input="hello", encoding_format="float")
    assert answer.data[0].embedding == [0.5, -0.25]
    assert rig.turns() == []
