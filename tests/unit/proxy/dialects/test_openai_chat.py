"""Chat completions through the proxy with OpenAI's own client: what it sees, what is recorded."""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections.abc import Callable

import httpx
import openai
import pytest

from support.engines.mock_engine import END, MODEL, Answer, MockEngine, logprobs_of, render
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from support.proxy.servers import eventually
from tracegrad.events import Turn

Turns = Callable[..., list[Turn]]

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]


def floats(values: list[float]) -> array[float]:
    return array("f", values)


def assert_sampled(turn: Turn, say: Answer, prompt: list[int]) -> None:
    assert turn.prompt_token_ids.tolist() == prompt
    assert turn.completion_token_ids.tolist() == say.token_ids
    assert turn.completion_logprobs == floats(logprobs_of(say.token_ids))
    assert turn.policy_versions == ((0, len(say.token_ids)),)
    assert turn.finish_reason == say.finish_reason
    assert turn.untrainable is None


def test_a_whole_answer_is_recorded_and_stripped(rig: ProxyWithEngine) -> None:
    say = Answer("It is a fine day.")
    rig.engine.replies.append(say)
    answer = rig.client.chat.completions.create(model=MODEL, messages=HELLO)

    assert answer.choices[0].message.content == "It is a fine day."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == len(say.token_ids)
    text = answer.model_dump_json()
    assert "token_ids" not in text
    [turn] = rig.turns()
    assert_sampled(turn, say, render(HELLO))
    assert (turn.rollout_id, turn.dialect, turn.model) == ("r1", "chat", MODEL)
    assert turn.parent_id is None
    assert turn.fork_reason is None
    assert turn.request["messages"] == HELLO
    assert "return_token_ids" not in turn.request
    assert turn.response["choices"][0]["message"]["content"] == "It is a fine day."
    assert rig.engine.requests[0]["return_token_ids"] is True
    assert rig.engine.requests[0]["logprobs"] is True


def test_a_stream_comes_chunk_by_chunk_and_is_recorded(rig: ProxyWithEngine) -> None:
    say = Answer("A stream of words, one after another.")
    rig.engine.replies.append(say)
    later = rig.engine.wait_before(3)
    stream = rig.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    early = [next(stream) for _ in range(4)]  # the role, and three chunks of the text
    assert [c.choices[0].delta.content for c in early] == ["", "A st", "ream", " of "]
    later.set()
    late = list(stream)

    assert all("token_ids" not in c.model_dump_json() for c in early + late)
    assert all(c.choices[0].logprobs is None for c in early + late)
    assert "".join(c.choices[0].delta.content or "" for c in early + late) == say.content
    assert late[-1].choices[0].finish_reason == "stop"
    [turn] = rig.turns()
    assert_sampled(turn, say, render(HELLO))
    assert turn.response["choices"][0]["message"] == {"role": "assistant", "content": say.content}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_asks_for_ids_and_logprobs_gets_them(
    rig: ProxyWithEngine, stream: bool
) -> None:
    say = Answer("ids, please")
    rig.engine.replies.append(say)
    answer = rig.client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        stream=stream,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    parts = list(answer) if stream else [answer]
    prompts = [p.prompt_token_ids for p in parts if getattr(p, "prompt_token_ids", None)]
    ids = [i for p in parts for i in getattr(p.choices[0], "token_ids", None) or []]
    entries = [e for p in parts if p.choices[0].logprobs for e in p.choices[0].logprobs.content]
    assert prompts == [render(HELLO)]
    assert ids == say.token_ids
    assert [e.logprob for e in entries] == logprobs_of(say.token_ids)
    assert_sampled(rig.turns()[0], say, render(HELLO))


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_alone_do_not_bring_ids(rig: ProxyWithEngine, stream: bool) -> None:
    body = {"messages": HELLO, "logprobs": True, "stream": stream}
    text = rig.http.post("/v1/chat/completions", json=body).text
    assert "token_ids" not in text
    assert '"logprob":-0.125' in text


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_arrive_whole(rig: ProxyWithEngine, stream: bool) -> None:
    arguments = '{"city": "Ghent", "unit": "celsius"}'
    say = Answer("", [("look", arguments)])
    rig.engine.replies.append(say)
    if stream:
        with rig.client.chat.completions.stream(model=MODEL, messages=HELLO, tools=TOOLS) as events:
            answer = events.get_final_completion()
    else:
        answer = rig.client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)

    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", arguments)
    assert answer.choices[0].finish_reason == "tool_calls"
    [turn] = rig.turns()
    assert_sampled(turn, say, render(HELLO, TOOLS))
    [recorded] = turn.response["choices"][0]["message"]["tool_calls"]
    assert recorded["id"] == call.id
    assert recorded["function"] == {"name": "look", "arguments": arguments}


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_is_its_own_turn(rig: ProxyWithEngine, stream: bool) -> None:
    says = [Answer("first"), Answer("second, longer"), Answer("third", cut=True)]
    rig.engine.replies += says
    answer = rig.client.chat.completions.create(model=MODEL, messages=HELLO, n=3, stream=stream)
    if stream:
        texts = ["", "", ""]
        for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = [choice.message.content for choice in answer.choices]
    assert texts == [say.content for say in says]
    recorded = rig.turns()
    assert len(recorded) == 3
    for turn, say in zip(recorded, says, strict=True):
        assert_sampled(turn, say, render(HELLO))
        assert turn.parent_id is None


def test_usage_of_a_stream_comes_after_the_finish(rig: ProxyWithEngine) -> None:
    chunks = list(
        rig.client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [bool(c.usage) for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.completion_tokens == len(Answer().token_ids)
    assert rig.turns()[0].response["usage"] == chunks[-1].usage.model_dump(exclude_unset=True)


def test_a_stream_shows_no_usage_that_its_client_did_not_ask_for(rig: ProxyWithEngine) -> None:
    say = Answer("It is a fine day.")
    rig.engine.replies.append(say)
    chunks = list(rig.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    assert not any(chunk.usage for chunk in chunks)
    assert rig.engine.requests[0]["stream_options"] == {"include_usage": True}, "for the record"
    [turn] = rig.turns()
    assert_sampled(turn, say, render(HELLO))
    assert turn.response["usage"]["completion_tokens"] == len(say.token_ids)
    [row] = rig.store.rollouts()
    assert row.completion_tokens == len(say.token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_hidden_reasoning_is_still_recorded(rig: ProxyWithEngine, stream: bool) -> None:
    say = Answer("Yes.", reasoning="Is it so? It is.")
    rig.engine.replies.append(say)
    answer = rig.client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=stream, extra_body={"include_reasoning": False}
    )
    parts = list(answer) if stream else [answer]
    assert all("Is it so?" not in part.model_dump_json() for part in parts)
    assert "include_reasoning" not in rig.engine.requests[0]
    assert_sampled(rig.turns()[0], say, render(HELLO))


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_waits_for_the_commit(rig: ProxyWithEngine, stream: bool) -> None:
    rig.engine.replies.append(Answer("Not yet."))
    seen: list[str] = []
    ended = threading.Event()

    def agent() -> None:
        answer = rig.client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
        for part in answer if stream else [answer]:
            seen.append(part.choices[0].finish_reason)
        ended.set()

    rig.writer.hold()
    thread = threading.Thread(target=agent)
    thread.start()
    eventually(lambda: rig.writer.waiting)
    assert not ended.wait(0.2)
    assert "stop" not in seen
    if stream:
        assert seen, "what comes before the end is not held back"
    assert rig.turns() == []
    rig.writer.release()
    assert ended.wait(60)
    thread.join()
    assert seen[-1] == "stop"
    assert len(rig.turns()) == 1


def test_commit_is_before_done_on_the_wire(rig: ProxyWithEngine) -> None:
    got: list[str] = []

    def read() -> None:
        body = {"messages": HELLO, "stream": True}
        with rig.http.stream("POST", "/rollouts/r1/v1/chat/completions", json=body) as response:
            got.extend(response.iter_text())

    rig.writer.hold()
    thread = threading.Thread(target=read)
    thread.start()
    eventually(lambda: rig.writer.waiting)
    time.sleep(0.1)
    assert "[DONE]" not in "".join(got)
    assert '"finish_reason":"stop"' not in "".join(got)
    assert rig.turns() == []
    rig.writer.release()
    thread.join()
    assert '"finish_reason":"stop"' in "".join(got)
    assert got[-1].endswith("data: [DONE]\n\n")
    assert len(rig.turns()) == 1


def test_a_cut_reply_has_no_end_token(rig: ProxyWithEngine) -> None:
    rig.engine.replies.append(Answer("cut off he", cut=True))
    answer = rig.client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10)
    assert answer.choices[0].finish_reason == "length"
    [turn] = rig.turns()
    assert END not in turn.completion_token_ids
    assert turn.sampling["max_tokens"] == 10


def test_sampling_settings_are_recorded_with_their_defaults(rig: ProxyWithEngine) -> None:
    rig.client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0.7, seed=3, stop="#"
    )
    assert rig.turns()[0].sampling == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": 3,
        "stop": "#",
    }
    assert rig.turns()[0].untrainable is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"temperature": 0}, "greedy"),
        ({"temperature": 0.009}, "greedy"),
        ({"temperature": 0.01}, None),
        ({"top_p": 0.9}, "sampling_truncated"),
        ({"top_k": 5}, "sampling_truncated"),
        ({"min_p": 0.1}, "sampling_truncated"),
        ({"presence_penalty": 0.5}, "sampling_penalised"),
        ({"repetition_penalty": 1.1}, "sampling_penalised"),
        ({"logit_bias": {"5": 1}}, "sampling_penalised"),
        ({"response_format": {"type": "json_object"}}, "constrained"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "constrained"),
        ({"tool_choice": "required", "tools": TOOLS}, "constrained"),
        ({"min_tokens": 4}, "constrained"),
        ({"bad_words": ["no"]}, "constrained"),
        ({"allowed_token_ids": [5, 6]}, "constrained"),
        ({"thinking_token_budget": 0}, "constrained"),
        ({"thinking_token_budget": -1}, None),
        ({"watermarking": True}, "sampling_replaced"),
        ({"custom_logit_processor": "ban"}, None),  # it does not reach the engine
        ({"vllm_xargs": {}, "bad_words": [], "watermarking": False}, None),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "constrained",
        ),
        ({"response_format": {"type": "text"}, "tool_choice": "auto", "tools": TOOLS}, None),
        ({"temperature": None, "top_p": None, "top_k": 0, "n": None}, None),
    ],
)
def test_what_must_not_be_trained_says_why(
    rig: ProxyWithEngine, settings: dict[str, object], reason: str | None
) -> None:
    body = {"messages": HELLO, **settings}
    assert rig.http.post("/rollouts/r1/v1/chat/completions", json=body).status_code == 200
    assert rig.turns()[0].untrainable == reason


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_without_ids_still_serves(rig: ProxyWithEngine, stream: bool) -> None:
    rig.engine.tell_ids = False
    rig.engine.replies.append(Answer("no ids here"))
    answer = rig.client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
    parts = list(answer) if stream else [answer]
    assert parts[-1].choices[0].finish_reason == "stop"
    [turn] = rig.turns()
    assert turn.untrainable == "no_tokens"
    assert len(turn.completion_token_ids) == 0


def test_models_are_the_engines(rig: ProxyWithEngine) -> None:
    assert [model.id for model in rig.client.models.list()] == [MODEL]
    assert httpx.get(f"{rig.url}/rollouts/r9/v1/models").json()["data"][0]["id"] == MODEL


def test_one_model_takes_the_place_of_whatever_name_the_agent_gives(
    engine: MockEngine, serve_proxy: ServeProxy, turns: Turns
) -> None:
    with serve_proxy(model="policy") as http:
        body = {"model": "gpt-4.1-mini", "messages": HELLO}
        http.post("/rollouts/r1/v1/chat/completions", json=body).raise_for_status()
    assert engine.requests[-1]["model"] == "policy"
    [turn] = turns()
    assert turn.model == "policy"
    assert turn.request is not None
    assert turn.request["model"] == "gpt-4.1-mini"


def test_concurrent_calls_are_all_recorded(rig: ProxyWithEngine) -> None:
    def agent(number: int) -> None:
        with openai.OpenAI(base_url=f"{rig.url}/rollouts/c{number}/v1", api_key="none") as client:
            for stream in (False, True):
                answer = client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": f"call {number}"}],
                    stream=stream,
                )
                if stream:
                    list(answer)

    threads = [threading.Thread(target=agent, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(16):
        prompt = render([{"role": "user", "content": f"call {number}"}])
        assert [t.prompt_token_ids.tolist() for t in rig.turns(f"c{number}")] == [prompt, prompt]
    assert json.dumps(rig.turns("c0")[0].request)
