"""Responses API: what a request means in canonical form, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import TypeAdapter

from support.engines.engine_answers import tool_call
from support.proxy.openai_responses import PATCH, TOOL, ask, parse
from tracegrad.events import new_id
from tracegrad.proxy.dialects.openai_responses.response import seal_reasoning

Json = dict[str, Any]

TURN, OTHER = new_id(), new_id()
PARAMS: TypeAdapter[Any] = TypeAdapter(ResponseCreateParamsNonStreaming)
PICTURE = "data:image/png;base64,AAAA"


def messages(items: list[Json], **request: Any) -> list[Json]:
    return ask(input=items, **request).messages


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def reasoning(text: str, **item: Any) -> Json:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "summary": [], "content": content, **item}


def message(text: str, **item: Any) -> Json:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, **item}


def call(call_id: str, **item: Any) -> Json:
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": "look",
        "arguments": '{"at":  "it"}',
        **item,
    }


def output(call_id: str, said: Any = "seen") -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": said}


def test_text_is_a_user_message_behind_the_instructions() -> None:
    read = ask(instructions="Be brief.", input="hi")
    assert read.messages == [{"role": "system", "content": "Be brief."}, user("hi")]
    assert read.body["model"] == "m"
    assert (read.dialect, read.stream, read.untrainable) == ("responses", False, None)
    assert read.request["input"] == "hi"


DEVELOPERS = [
    {"role": "developer", "content": "One."},
    {"role": "system", "content": [{"type": "input_text", "text": "Two."}]},
    user("hi"),
    {"role": "developer", "content": "Now in French."},
]


def test_what_developers_say_before_the_conversation_is_one_system_message() -> None:
    assert messages(DEVELOPERS) == [
        {"role": "system", "content": "One.\n\nTwo."},
        user("hi"),
        {"role": "system", "content": "Now in French."},
    ]


def test_instructions_stay_by_themselves_as_a_later_call_does_not_repeat_them() -> None:
    read = ask(input=DEVELOPERS, instructions="Be brief.")
    assert read.messages[0] == {"role": "system", "content": "Be brief."}
    assert read.own_messages == messages(DEVELOPERS)


def test_messages_come_in_the_easy_and_in_the_full_form() -> None:
    text = {"type": "input_text", "text": "a"}
    full = {"type": "message", "role": "user", "content": [text, {**text, "text": "b"}]}
    read = messages([user("hi"), {"role": "assistant", "content": "ho"}, full, message("c")])
    assert read == [
        user("hi"),
        {"role": "assistant", "content": "ho"},
        user("a\nb"),
        {"role": "assistant", "content": "c"},
    ]


def test_blocks_of_an_assistants_message_are_joined_without_a_break() -> None:
    blocks = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    item = {"type": "message", "role": "assistant", "content": blocks}
    assert messages([user("hi"), item])[1] == {"role": "assistant", "content": "ab"}


def test_media_goes_through_and_marks_the_turn() -> None:
    image = {"type": "input_image", "image_url": PICTURE, "detail": "low"}
    parts = [{"type": "input_text", "text": "What is it?"}, image]
    read = ask(input=[{"role": "user", "content": parts}])
    assert read.messages[0]["content"] == [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}},
    ]
    assert read.untrainable == "media"


def test_media_in_a_tools_output_goes_through_and_marks_the_turn() -> None:
    image = {"type": "input_image", "image_url": PICTURE, "detail": "original"}
    read = ask(input=[user("hi"), call("c1"), output("c1", [image])])
    assert read.messages[2] == {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [{"type": "image_url", "image_url": {"url": PICTURE}}],
    }
    assert read.untrainable == "media"


def test_a_tools_output_of_text_parts_is_one_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    read = ask(input=[user("hi"), call("c1"), output("c1", parts)])
    assert read.messages[2] == {"role": "tool", "tool_call_id": "c1", "content": "a\nb"}
    assert read.untrainable is None


def test_a_turns_items_become_one_message_again() -> None:
    said = [reasoning("Hm."), message("Let me."), call("c1"), call("c2")]
    results = [output("c1"), output("c2", "nothing")]
    read = messages([user("hi"), *said, *results, user("and?")])
    assert read == [
        user("hi"),
        {
            "role": "assistant",
            "content": "Let me.",
            "reasoning": "Hm.",
            "tool_calls": [
                tool_call("c1", "look", '{"at":  "it"}'),
                tool_call("c2", "look", '{"at":  "it"}'),
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        {"role": "tool", "tool_call_id": "c2", "content": "nothing"},
        user("and?"),
    ]


def test_ids_separate_turns_that_follow_each_other() -> None:
    read = messages([user("hi"), message("a", id=f"msg_{TURN}"), message("b", id=f"msg_{OTHER}")])
    assert [said["content"] for said in read] == ["hi", "a", "b"]
    joined = messages(
        [user("hi"), message("a", id=f"msg_{TURN}"), message("b", id=f"msg_{TURN}_1")]
    )
    assert [said["content"] for said in joined] == ["hi", "ab"]


def test_ids_join_a_turn_whose_outputs_came_between_its_calls() -> None:
    items = [call("c1", id=f"fc_{TURN}"), output("c1"), call("c2", id=f"fc_{TURN}_1")]
    read = messages([user("hi"), *items, output("c2")])
    assert [said["role"] for said in read] == ["user", "assistant", "tool", "tool"]
    assert [reported["id"] for reported in read[1]["tool_calls"]] == ["c1", "c2"]


def test_without_ids_the_next_turn_begins_after_a_tools_output() -> None:
    read = messages([user("hi"), call("c1"), output("c1"), call("c2"), output("c2"), message("a")])
    roles = [said["role"] for said in read]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]


def test_without_ids_reasoning_or_a_message_after_a_message_begins_a_turn() -> None:
    read = messages([user("hi"), message("a"), reasoning("Hm."), message("b"), message("c")])
    assert read[1:] == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "Hm."},
        {"role": "assistant", "content": "c"},
    ]


def test_a_message_between_a_call_and_its_output_is_of_the_same_turn() -> None:
    read = messages([user("hi"), call("c1"), message("On it."), output("c1")])
    assert [said["role"] for said in read] == ["user", "assistant", "tool"]
    assert read[1]["content"] == "On it."
    assert read[1]["tool_calls"][0]["id"] == "c1"


def test_reasoning_is_read_from_its_content_then_from_what_was_sealed_then_from_its_summary() -> (
    None
):
    summary = [{"type": "summary_text", "text": "s"}]
    own = seal_reasoning("r")
    for item, text in [
        (reasoning("t", encrypted_content=own, summary=summary), "t"),
        ({"type": "reasoning", "summary": summary, "encrypted_content": own}, "r"),
        ({"type": "reasoning", "summary": summary, "encrypted_content": "theirs"}, "s"),
        ({"type": "reasoning", "summary": summary}, "s"),
    ]:
        assert messages([user("hi"), item, message("a")])[1]["reasoning"] == text


def test_reasoning_without_a_text_says_nothing() -> None:
    read = messages([user("hi"), {"type": "reasoning", "id": "rs_1", "summary": []}, user("ho")])
    assert read == [user("hi"), user("ho")]


def test_a_call_of_a_custom_tool_is_a_call_with_one_argument() -> None:
    item = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*\n"}
    said = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    read = messages([user("hi"), item, said], tools=[PATCH])
    assert read[1]["tool_calls"] == [tool_call("c1", "apply_patch", '{"input":"*\\n"}')]
    assert read[2] == {"role": "tool", "tool_call_id": "c1", "content": "done"}


def test_a_call_in_a_namespace_has_the_engines_name() -> None:
    read = messages([user("hi"), call("c1", namespace="eyes"), output("c1")])
    assert read[1]["tool_calls"][0]["function"]["name"] == "eyes__look"


def test_tools_are_functions_of_chat_completions() -> None:
    strict = {**TOOL, "name": "strictly", "strict": True}
    bare = {"type": "function", "name": "bare", "parameters": None}
    read = ask(tools=[TOOL, strict, bare], tool_choice="auto", parallel_tool_calls=False)
    look = {k: TOOL[k] for k in ("name", "description", "parameters")}
    assert read.body["tools"] == [
        {"type": "function", "function": look},
        {"type": "function", "function": {**look, "name": "strictly", "strict": True}},
        {
            "type": "function",
            "function": {"name": "bare", "parameters": {"type": "object", "properties": {}}},
        },
    ]
    assert read.body["tool_choice"] == "auto"
    assert read.body["parallel_tool_calls"] is False


def test_a_custom_tool_is_a_function_of_one_text_that_shows_its_grammar() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
    [tool] = ask(tools=[{**PATCH, "format": grammar}]).body["tools"]
    function = tool["function"]
    assert function["name"] == "apply_patch"
    assert function["description"] == "Patches."
    assert function["parameters"]["required"] == ["input"]
    described = function["parameters"]["properties"]["input"]
    assert described["type"] == "string"
    assert "lark" in described["description"]
    assert "start: WORD" in described["description"]


def test_a_namespaces_tools_are_named_after_it_and_it_is_described_once() -> None:
    space = {"type": "namespace", "name": "eyes", "description": "To see.", "tools": [TOOL, PATCH]}
    read = ask(tools=[space, TOOL]).body["tools"]
    functions = [tool["function"] for tool in read]
    assert [f["name"] for f in functions] == ["eyes__look", "eyes__apply_patch", "look"]
    described = [f["description"] for f in functions]
    assert described == ["To see.\n\nLooks.", "Patches.", "Looks."]


def test_tools_among_the_input_are_tools_too() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [TOOL]}
    read = ask(input=[item, user("hi")], tools=[PATCH])
    assert [tool["function"]["name"] for tool in read.body["tools"]] == ["apply_patch", "look"]
    assert read.messages == [user("hi")]


def test_a_tool_choice_names_a_tool_by_the_engines_name_or_its_own() -> None:
    tools = [{"type": "namespace", "name": "eyes", "description": "", "tools": [TOOL]}, PATCH]
    for name in ("look", "eyes__look"):
        choice = {"type": "function", "name": name}
        read = ask(tools=tools, tool_choice=choice).body["tool_choice"]
        assert read == {"type": "function", "function": {"name": "eyes__look"}}
    read = ask(tools=tools, tool_choice={"type": "custom", "name": "apply_patch"})
    assert read.body["tool_choice"]["function"]["name"] == "apply_patch"


def test_only_allowed_tools_are_shown_to_the_engine() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "look"}]}
    read = ask(tools=[TOOL, PATCH], tool_choice=choice)
    assert [tool["function"]["name"] for tool in read.body["tools"]] == ["look"]
    assert read.body["tool_choice"] == "required"


def test_a_tool_choice_without_tools_is_not_sent() -> None:
    read = ask(tool_choice="none", tools=[], parallel_tool_calls=True)
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & set(read.body)


def test_settings_have_the_engines_names() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    read = ask(
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        reasoning={"effort": "low", "summary": "auto", "context": "all_turns"},
        text={"format": form, "verbosity": "low"},
        top_k=5,
        seed=1,
        stop=["x"],
        chat_template_kwargs={"enable_thinking": False},
    ).body
    del read["messages"]
    assert read == {
        "model": "m",
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": schema, "strict": True},
        },
        "top_k": 5,
        "seed": 1,
        "stop": ["x"],
        "chat_template_kwargs": {"enable_thinking": False},
    }


@pytest.mark.parametrize(
    ("form", "canonical"),
    [({"type": "text"}, None), ({"type": "json_object"}, {"type": "json_object"})],
)
def test_plain_text_needs_no_response_format(form: Json, canonical: Json | None) -> None:
    assert ask(text={"format": form}).body.get("response_format") == canonical


def test_logprobs_are_shown_to_those_who_include_them() -> None:
    asked = ask(include=["message.output_text.logprobs"], top_logprobs=3)
    assert asked.visible.logprobs
    assert asked.body["top_logprobs"] == 3
    silent = ask(top_logprobs=3)
    assert not silent.visible.logprobs
    assert "top_logprobs" not in silent.body


def test_reasoning_is_hidden_from_those_who_say_so() -> None:
    read = ask(include_reasoning=False)
    assert not read.visible.reasoning
    assert "include_reasoning" not in read.body


def test_a_response_can_be_continued() -> None:
    read = ask(previous_response_id=f"resp_{TURN}", input=[output("c1")])
    assert read.previous == TURN
    assert read.messages == [{"role": "tool", "tool_call_id": "c1", "content": "seen"}]
    assert parse({"model": "m", "previous_response_id": f"resp_{TURN}"}).messages == []


def test_what_concerns_billing_caching_and_storage_has_no_effect() -> None:
    read = ask(
        metadata={"a": "b"},
        user="u",
        store=False,
        service_tier="flex",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        max_tool_calls=3,
        stream_options={"include_obfuscation": False},
        client_metadata={"session_id": "s"},
        include=["reasoning.encrypted_content"],
        background=False,
        truncation="disabled",
        conversation=None,
    )
    assert read.body == {"messages": [user("hi")], "model": "m"}


@pytest.mark.parametrize(
    "request_",
    [
        {"model": "m", "input": [user("hi"), message("a", id="msg_1", status="completed")]},
        {"model": "m", "input": "hi", "tools": [TOOL, PATCH], "tool_choice": "required"},
        {"model": "m", "input": "hi", "reasoning": {"effort": "low"}, "store": False},
        {"model": "m", "input": [reasoning("r", id="rs_1"), call("c1"), output("c1")]},
    ],
)
def test_these_requests_are_of_openais_types(request_: Json) -> None:
    PARAMS.validate_python(request_)
    assert parse(request_).messages
