"""Real vLLM gets exactly the recorded tokens back, whatever a client makes of the replies.

The model is random; a regular expression makes it think and call a tool, spelled as no template
would spell it, so that rendering the conversation again gives other tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from google import genai
from google.genai import types

from support.chat.chat_templates import chat_template
from support.trainer.tiny_model import load_model, reference_logprobs, tiny_model, tiny_tokenizer
from tracegrad.events import Turn
from tracegrad.store import Store
from tracegrad.turn_tree import extends, paths
from tracegrad_trainer.config.vllm import VllmSettings
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.utils.network import find_free_port
from tracegrad_trainer.utils.subprocesses import ChildProcess, is_responding

pytestmark = pytest.mark.vllm

CALLS = (
    r'<think>\n[a-z ]{4,12}\n</think>\n\n<tool_call>\n\{ "name":"look",  "arguments" : '
    r'\{"at":   "[a-z]{3}", "n" :1\.0\}\}\n</tool_call>'
)
TEXT = r"<think>\n[a-z ]{4,12}\n</think>\n\n  [a-z]{3,8} [A-Z]{2,4}\."
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "number"}}}
TURNS = 4  # three calls of a tool, then a text
Turns = Callable[[str], list[Turn]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact") / "model"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template("Qwen-Qwen3-0.6B")
    model = tiny_model(len(tokenizer))
    model.config.max_position_embeddings = 8192
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return path


@pytest.fixture(scope="module")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = VllmSettings(
        model=str(model_dir),
        port=find_free_port(),
        max_model_len=8192,
        kv_cache_memory_bytes=128 << 20,
        reasoning_parser="qwen3",
        extra_args=[
            *("--structured-outputs-config", '{"enable_in_reasoning": true}'),
            *("--override-generation-config", '{"top_k": 1, "repetition_penalty": 2.0}'),
        ],
        log=tmp_path_factory.mktemp("vllm") / "vllm.log",
    )
    with VllmProcess(settings) as process:
        process.wait_healthy(timeout=240)
        yield process.url


@pytest.fixture(scope="module")
def store_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/store.db"


@pytest.fixture(scope="module")
def proxy(engine: str, store_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = find_free_port()
    command = [str(Path(sys.executable).with_name("tracegrad")), "proxy", "--port", str(port)]
    command += ["--upstream", engine, "--store", store_url, "--model", "policy"]
    # The tiny model writes what regular expressions make it write, which only an admin may ask for.
    env = {"TRACEGRAD_PROXY_PASS_UNKNOWN_FIELDS": "true"}
    log = tmp_path_factory.mktemp("proxy") / "proxy.log"
    child = ChildProcess("proxy", command, log=log, env=env)
    url = f"http://127.0.0.1:{port}"
    child.start()
    try:
        child.wait_until_ready(lambda: is_responding(f"{url}/healthz"), timeout_s=60)
        yield url
    finally:
        child.stop()


@pytest.fixture
def turns(store_url: str) -> Turns:
    def read(rollout_id: str) -> list[Turn]:
        with Store.open(store_url) as store:
            return store.rollout_turns(rollout_id)

    return read


def forced(number: int) -> dict[str, Any]:
    return {"structured_outputs": {"regex": TEXT if number == TURNS - 1 else CALLS}}


def assert_one_exact_path(recorded: list[Turn]) -> None:
    assert len(recorded) == TURNS
    assert [turn.fork_reason for turn in recorded] == [None] * TURNS
    for parent, child in pairwise(recorded):
        assert child.parent_id == parent.turn_id
        assert extends(child.prompt_token_ids, parent)
    for turn in recorded:
        assert turn.untrainable == "constrained"
        told = turn.completion_logprobs
        assert len(told) == len(turn.completion_token_ids) > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", ["compact", "without reasoning", "stripped"])
def test_chat_completions(proxy: str, turns: Turns, stream: bool, echo: str) -> None:
    rollout = f"chat-{echo.replace(' ', '-')}-{stream}"
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is there?"},
    ]
    with openai.OpenAI(base_url=f"{proxy}/rollouts/{rollout}/v1", api_key="none") as client:
        for number in range(TURNS):
            asked = {"model": "any", "messages": messages, "tools": tools, "max_tokens": 200}
            if stream:
                with client.chat.completions.stream(**asked, extra_body=forced(number)) as events:
                    reply = events.get_final_completion().choices[0].message
            else:
                answer = client.chat.completions.create(**asked, extra_body=forced(number))
                reply = answer.choices[0].message
            messages.append(echoed(reply, echo))
            for call in reply.tool_calls or ():
                result = {"role": "tool", "tool_call_id": call.id, "content": f"a {number}  b"}
                messages.append(result)
    assert_one_exact_path(turns(rollout))


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_defaults_of_the_engine_do_not_bend_what_is_trained(
    engine: str, proxy: str, turns: Turns, path: str
) -> None:
    prompt = "What is there?"
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 20}
    if path == "completions":
        asked |= {"prompt": prompt}
        own = httpx.post(f"{engine}/v1/{path}", json={**asked, "logprobs": 0}, timeout=60).json()
        logprobs = own["choices"][0]["logprobs"]["token_logprobs"]
    else:
        asked |= {"messages": [{"role": "user", "content": prompt}]}
        own = httpx.post(f"{engine}/v1/{path}", json={**asked, "logprobs": True}, timeout=60).json()
        logprobs = [token["logprob"] for token in own["choices"][0]["logprobs"]["content"]]
    assert logprobs == [0.0] * len(logprobs), "the engine left it one token each"
    rollout = f"defaults-{path.replace('/', '-')}"
    url = f"{proxy}/rollouts/{rollout}/v1/{path}"
    httpx.post(url, json=asked, timeout=60).raise_for_status()
    [turn] = turns(rollout)
    assert turn.untrainable is None
    assert max(turn.completion_logprobs) < 0


def echoed(reply: Any, how: str) -> dict[str, Any]:
    """As agents send a reply back: arguments spelled anew, text stripped, reasoning dropped."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": (reply.content or "").strip() or None,
    }
    if how == "compact":
        message["reasoning"] = (getattr(reply, "reasoning", None) or "").strip()
    if reply.tool_calls:
        spell = {"separators": (",", ":")} if how == "compact" else {"indent": 1}
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": json.dumps(json.loads(call.function.arguments), **spell),
                },
            }
            for call in reply.tool_calls
        ]
    return message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_responses(proxy: str, turns: Turns, stream: bool, named: bool) -> None:
    """`named`: the earlier response is named, not sent again."""
    rollout = f"responses-{named}-{stream}"
    tools: Any = [{"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}]
    items: list[Any] = [{"role": "user", "content": "What is there?"}]
    previous = None
    with openai.OpenAI(base_url=f"{proxy}/rollouts/{rollout}/v1", api_key="none") as client:
        for number in range(TURNS):
            asked = {"model": "any", "input": items, "tools": tools, "max_output_tokens": 200}
            asked |= {"instructions": "Be brief.", "extra_body": forced(number)}
            if previous is not None:
                asked["previous_response_id"] = previous
            if stream:
                with client.responses.stream(**asked) as events:
                    response = events.get_final_response()
            else:
                response = client.responses.create(**asked)
            new: list[Any] = [
                {"type": "function_call_output", "call_id": item.call_id, "output": f"{number}"}
                for item in response.output
                if item.type == "function_call"
            ]
            if named:
                items, previous = new, response.id
            else:
                said = [item.model_dump(exclude_none=True) for item in response.output]
                items = [*items, *(i for i in said if i["type"] != "reasoning"), *new]
    assert_one_exact_path(turns(rollout))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_messages(proxy: str, turns: Turns, stream: bool, thinking: bool) -> None:
    """`thinking`: the client sends the model's thinking back."""
    rollout = f"messages-{thinking}-{stream}"
    tools: Any = [{"name": "look", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": "What is there?"}]
    with anthropic.Anthropic(base_url=f"{proxy}/rollouts/{rollout}", api_key="none") as client:
        for number in range(TURNS):
            asked = {"model": "any", "messages": messages, "tools": tools, "max_tokens": 200}
            asked |= {"system": "Be brief.", "extra_body": forced(number)}
            if stream:
                with client.messages.stream(**asked) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(**asked)
            said = [block.model_dump(exclude_none=True) for block in message.content]
            kept = [block for block in said if thinking or block["type"] != "thinking"]
            messages.append({"role": "assistant", "content": kept})
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": f"{number}"}
                for block in said
                if block["type"] == "tool_use"
            ]
            if results:
                messages.append({"role": "user", "content": results})
    assert_one_exact_path(turns(rollout))


@pytest.mark.parametrize("stream", [False, True])
def test_gemini(proxy: str, turns: Turns, stream: bool) -> None:
    rollout = f"gemini-{stream}"
    options = types.HttpOptions(base_url=f"{proxy}/rollouts/{rollout}")
    look = types.FunctionDeclaration(name="look", parameters_json_schema=PARAMETERS)
    contents: list[Any] = [types.UserContent("What is there?")]
    with genai.Client(api_key="none", http_options=options) as client:
        for number in range(TURNS):
            config = types.GenerateContentConfig(
                tools=[types.Tool(function_declarations=[look])],
                system_instruction="Be brief.",
                max_output_tokens=200,
                http_options=types.HttpOptions(extra_body=forced(number)),
            )
            asked = {"model": "any", "contents": contents, "config": config}
            if stream:
                chunks = client.models.generate_content_stream(**asked)
                parts = [part for chunk in chunks for part in chunk.parts or ()]
            else:
                parts = client.models.generate_content(**asked).parts or []
            calls = [part.function_call for part in parts if part.function_call]
            results = [
                types.Part.from_function_response(name="look", response={"at": number})
                for _ in calls
            ]
            contents += [
                types.ModelContent(parts),
                *([types.UserContent(results)] if results else []),
            ]
    assert_one_exact_path(turns(rollout))


def test_two_sub_agents_in_turn_are_two_paths(proxy: str, turns: Turns) -> None:
    """Ten calls each, alternating, in one rollout."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
    agents: list[list[Any]] = [
        [{"role": "user", "content": f"You are agent {name}."}] for name in ("one", "two")
    ]
    url = f"{proxy}/rollouts/sub-agents/v1/chat/completions"
    for number in range(20):
        messages = agents[number % 2]
        body = {"messages": messages, "tools": tools, "max_tokens": 99, "seed": number}
        body |= {"structured_outputs": {"regex": CALLS}}
        reply = httpx.post(url, json=body, timeout=60).json()["choices"][0]["message"]
        [call] = reply["tool_calls"]
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"},
        ]
    recorded = turns("sub-agents")
    assert len(recorded) == 20
    assert [len(path) for path in paths(recorded)] == [10, 10]
    assert [turn.fork_reason for turn in recorded[:2]] == [None, "new_conversation"]
    assert {turn.fork_reason for turn in recorded[2:]} == {None}


def test_the_log_probabilities_of_a_spliced_prompt_are_true(
    proxy: str, turns: Turns, model_dir: Path
) -> None:
    """Unforced, so that they are those of the model itself, computed over the spliced prompt."""
    url = f"{proxy}/rollouts/unforced/v1/chat/completions"
    tools = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
    first = {"role": "user", "content": "What is there?"}
    body = {"messages": [first], "tools": tools, "max_tokens": 100, **forced(0)}
    reply = httpx.post(url, json=body, timeout=60).json()["choices"][0]["message"]
    call = reply["tool_calls"][0]
    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
    said = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "a lamp"}
    body = {"messages": [first, said, result], "tools": tools, "max_tokens": 40, "seed": 5}
    httpx.post(url, json=body, timeout=60).raise_for_status()
    parent, child = turns("unforced")
    assert extends(child.prompt_token_ids, parent)
    assert child.untrainable is None
    expected = reference_logprobs(
        load_model(model_dir), child.prompt_token_ids, child.completion_token_ids
    )
    assert child.completion_logprobs.tolist() == pytest.approx(expected, abs=1e-4)
