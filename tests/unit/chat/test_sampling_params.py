"""Sampling that bends the distribution: kept as asked, or overruled where the operator says so."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from support.engines.mock_engine import MODEL, MockEngine
from support.proxy.servers import HeldWriter, serving
from tracegrad.chat.messages import render_options
from tracegrad.chat.sampling_params import (
    DEFAULTS,
    force_on_policy,
    sampling_params_of,
    untrainable_reason,
)
from tracegrad.events import GREEDY_BELOW, Turn
from tracegrad.proxy import create_app
from tracegrad.proxy.config import ProxySettings
from tracegrad.store import Store

FUNCTION = {"name": "look", "description": "", "parameters": {"type": "object"}}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
BENT: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1},
    "min_tokens": 3,
    "vllm_xargs": {"boost": 2},
    "logits_processors": ["boost"],
    "use_beam_search": True,
    "watermarking": True,
    "tools": [STRICT],
}
PATH = "/rollouts/r1/v1/chat/completions"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **BENT}


Serve = Callable[[Literal["free", "as_asked"]], AbstractContextManager[httpx.Client]]


@pytest.fixture
def sampling(engine_url: str, store: Store, writer: HeldWriter) -> Serve:
    """Proxies that pass every field on: without that, beams and plug-ins of the engine's are
    refused."""

    @contextmanager
    def serve(sampling: Literal["free", "as_asked"]) -> Iterator[httpx.Client]:
        settings = ProxySettings(upstream=engine_url, sampling=sampling, pass_unknown_fields=True)
        with (
            serving(create_app(settings, store=store, writer=writer)) as url,
            httpx.Client(base_url=url, timeout=20) as client,
        ):
            yield client

    return serve


def test_a_freed_call_can_be_trained() -> None:
    assert untrainable_reason(BENT, sampling_params_of(BENT)) == "greedy"
    body = force_on_policy(BENT)
    assert untrainable_reason(body, sampling_params_of(body)) is None
    assert body == {"temperature": 1.0, "tools": [{"type": "function", "function": FUNCTION}]}
    assert BENT["tools"][0]["function"]["strict"] is True, "what the client sent stays"


def test_vllm_raises_a_temperature_below_the_bound() -> None:
    """What is asked below it is not what is sampled at; at the bound it is."""
    [bound] = [
        ast.literal_eval(node.value)
        for node in source_of("sampling_params.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MAX_TEMP"
    ]
    assert bound == GREEDY_BELOW


def test_every_sampling_setting_of_vllm_is_known() -> None:
    """A field of its requests that nobody here has thought of fails this test."""
    protocol = source_of("entrypoints/openai/chat_completion/protocol.py")
    [request] = [
        node
        for node in protocol.body
        if isinstance(node, ast.ClassDef) and node.name == "ChatCompletionRequest"
    ]
    named = (node.target for node in request.body if isinstance(node, ast.AnnAssign))
    fields = {name for name in map(ast.unparse, named) if not name.startswith("_")}
    harmless = set(HARMLESS.split())
    bent = {
        name
        for name in fields - harmless
        if untrainable_reason(bent_by(name), sampling_params_of({}))
    }
    bent |= set(DEFAULTS)
    assert fields - harmless - bent == set()
    assert harmless <= fields


def source_of(path: str) -> ast.Module:
    """A file of the installed vLLM; to import it takes many seconds."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    return ast.parse((Path(found.submodule_search_locations[0]) / path).read_text())


def bent_by(name: str) -> dict[str, Any]:
    given: dict[str, Any] = {
        "response_format": {"type": "json_object"},
        "tools": [STRICT],
        "tool_choice": "required",
    }
    return {name: given.get(name, 1)}


# They say what the prompt is, when a reply ends, or how an answer is told.
HARMLESS = """
messages model logprobs top_logprobs max_tokens max_completion_tokens n seed stop stream
stream_options reasoning_effort include_reasoning parallel_tool_calls user length_penalty
stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens
spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
logprob_token_ids echo add_generation_prompt continue_final_message add_special_tokens documents
chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs priority request_id
session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
return_token_offsets return_prompt_text mm_payload return_mm_kwargs cache_salt kv_transfer_params
ec_transfer_params repetition_detection stream_interval
"""


@pytest.mark.parametrize(
    "wish",
    [
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"stop": ["x"], "max_tokens": 5, "seed": 3},
    ],
)
def test_what_the_answer_is_for_stays(wish: dict[str, Any]) -> None:
    assert force_on_policy({**wish, "top_p": 0.5}) == {**wish, "temperature": 1.0}


def test_strict_tools_do_not_change_the_conversation() -> None:
    assert (
        render_options({"tools": [STRICT]}).key
        == render_options(force_on_policy({"tools": [STRICT]})).key
    )
    other = {"type": "function", "function": {**FUNCTION, "name": "touch"}}
    assert render_options({"tools": [STRICT]}).key != render_options({"tools": [other]}).key


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_is_asked_for_free_samples(
    sampling: Serve, engine: MockEngine, turns: Callable[..., list[Turn]], stream: bool
) -> None:
    with sampling("free") as http:
        assert http.post(PATH, json={**ASK, "stream": stream}).status_code == 200
    asked = engine.requests[-1]
    assert asked["temperature"] == 1.0
    assert not {"top_p", "top_k", "min_p", "logit_bias"} & set(asked)
    [turn] = turns("r1")
    assert turn.untrainable is None
    assert turn.sampling["temperature"] == 1.0
    assert turn.request is not None
    assert turn.request["top_p"] == 0.9


def test_unless_it_is_told_the_proxy_samples_as_asked(
    sampling: Serve, engine: MockEngine, turns: Callable[..., list[Turn]]
) -> None:
    with sampling("as_asked") as http:
        assert http.post(PATH, json=ASK).status_code == 200
    assert engine.requests[-1]["top_k"] == 40
    [turn] = turns("r1")
    assert turn.untrainable == "greedy"


@pytest.mark.parametrize(
    "replaced",
    [
        {"vllm_xargs": {"watermark": 3}},
        {"logits_processors": ["ban:5"]},
        {"custom_logit_processor": "ban"},
        {"use_beam_search": True},
    ],
)
def test_samples_of_plug_ins_and_beams_are_not_the_policys(
    sampling: Serve, turns: Callable[..., list[Turn]], replaced: dict[str, Any]
) -> None:
    with sampling("as_asked") as http:
        body = {"model": MODEL, "messages": ASK["messages"], **replaced}
        assert http.post(PATH, json=body).status_code == 200
    assert turns("r1")[0].untrainable == "sampling_replaced"
