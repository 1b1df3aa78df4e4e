"""Sampling that bends the distribution: kept as asked, or overruled where the operator says so."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.chat.bent_sampling import BENT, FUNCTION, STRICT
from tracegrad.chat.messages import render_options
from tracegrad.chat.sampling_params import (
    DEFAULTS,
    bending_fields,
    force_on_policy,
    sampling_params_of,
    untrainable_reason,
)
from tracegrad.events import GREEDY_BELOW

FUNCTION_TOOL = {"type": "function", "function": FUNCTION}


def test_a_freed_call_can_be_trained() -> None:
    assert untrainable_reason(BENT, sampling_params_of(BENT)) == "greedy"
    body = force_on_policy(BENT)
    assert untrainable_reason(body, sampling_params_of(body)) is None
    assert body == {"temperature": 1.0, "tools": [FUNCTION_TOOL]}
    assert BENT["tools"][0]["function"]["strict"] is True, "what the client sent stays"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"temperature": 0}, ["temperature = 0"]),
        ({"temperature": 0.001}, ["temperature = 0.001"]),
        ({"temperature": 0.5, "stop": ["x"], "tools": [{"function": {"name": "f"}}]}, []),
        ({"top_p": 0.95, "top_k": 64}, ["top_p = 0.95", "top_k = 64"]),
        ({"frequency_penalty": 0.1}, ["frequency_penalty = 0.1"]),
        ({"logit_bias": {"1": 2}}, ["logit_bias"]),
        ({"vllm_xargs": {"a": 1}}, ["vllm_xargs"]),
        ({"tools": [STRICT, STRICT]}, ["strict tools"]),
        ({"tool_choice": "required"}, ['tool_choice = "required"']),
        ({"tool_choice": {"type": "function"}}, ["tool_choice"]),
        (
            {"tools": [FUNCTION_TOOL], "parallel_tool_calls": False},
            ["parallel_tool_calls = false"],
        ),
        ({"tools": [FUNCTION_TOOL], "parallel_tool_calls": True}, []),
        ({"tools": [FUNCTION_TOOL], "parallel_tool_calls": False, "tool_choice": "none"}, []),
        ({"tools": [], "parallel_tool_calls": False}, []),
        ({"response_format": {"type": "json_object"}}, ["response_format"]),
        ({"response_format": {"type": "text"}, "thinking_token_budget": -1}, []),
        ({"min_tokens": 3, "thinking_token_budget": 0}, ["thinking_token_budget", "min_tokens"]),
        ({"temperature": 0, "tools": [STRICT]}, ["temperature = 0", "strict tools"]),
    ],
)  # fmt: skip
def test_the_fields_that_bend_a_call_are_named(body: dict[str, Any], said: list[str]) -> None:
    assert bending_fields(body) == said
    assert bool(said) == (untrainable_reason(body, sampling_params_of(body)) is not None)


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
    if name == "parallel_tool_calls":
        return {"tools": [FUNCTION_TOOL], name: False}
    return {name: given.get(name, 1)}


# They say what the prompt is, when a reply ends, or how an answer is sent.
HARMLESS = """
messages model logprobs top_logprobs max_tokens max_completion_tokens n seed stop stream
stream_options reasoning_effort include_reasoning user length_penalty
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
        {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"stop": ["x"], "max_tokens": 5, "seed": 3},
    ],
)
def test_what_the_answer_is_for_stays(wish: dict[str, Any]) -> None:
    assert force_on_policy({**wish, "top_p": 0.5}) == {**wish, "temperature": 1.0}


def test_that_some_tool_must_be_called_is_overruled() -> None:
    asked = {"tools": [STRICT], "tool_choice": "required"}
    free = force_on_policy(asked)
    assert free["tool_choice"] == "auto"
    assert untrainable_reason(free, sampling_params_of(free)) is None
    assert asked["tool_choice"] == "required", "what the client sent stays"


@given(st.sets(st.sampled_from(sorted(BENT))), st.sampled_from([None, "auto", "none", "required"]))
def test_whatever_mixture_is_asked_for_can_be_trained(names: set[str], choice: str | None) -> None:
    body = {name: BENT[name] for name in names} | ({"tool_choice": choice} if choice else {})
    free = force_on_policy(body)
    assert untrainable_reason(free, sampling_params_of(free)) is None
    assert force_on_policy(free) == free
    assert free.keys() - body.keys() <= {"temperature"}


def test_strict_tools_do_not_change_the_conversation() -> None:
    assert (
        render_options({"tools": [STRICT]}).key
        == render_options(force_on_policy({"tools": [STRICT]})).key
    )
    other = {"type": "function", "function": {**FUNCTION, "name": "touch"}}
    assert render_options({"tools": [STRICT]}).key != render_options({"tools": [other]}).key
