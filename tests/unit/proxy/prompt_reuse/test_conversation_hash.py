"""Which recorded turn a conversation continues, however a client wrote it down again."""

from __future__ import annotations

import json
import marshal
from array import array
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.chat.conversations import (
    CALL,
    CALL_TOO,
    FOUND,
    SYSTEM,
    TOOLS,
    call,
    result,
    says,
    user,
)
from tracegrad.chat.call import RecordedTurn
from tracegrad.chat.messages import RenderOptions, custom_rendering_field, render_options
from tracegrad.proxy.prompt_reuse.conversation_hash import (
    HashedConversation,
    fork_reason_of_miss,
    hash_conversation,
    reply_difference,
    with_recorded_replies,
)
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason, PromptFork

Json = dict[str, Any]

FRAME = RenderOptions(TOOLS).key
ASK = user("How many lamps?")


def filed(*turns: tuple[list[Json], Json]) -> dict[bytes, str]:
    """A directory of turns named t0, t1, ... from their messages and replies."""
    return {
        hash_conversation(messages, FRAME).with_reply(reply).key: f"t{number}"
        for number, (messages, reply) in enumerate(turns)
    }


def found(messages: Sequence[Json], turns: dict[bytes, str], frame: bytes = FRAME) -> Any:
    ends = hash_conversation(messages, frame).reply_keys()
    return next(((at, turns[key]) for at, key in ends if key in turns), None)


def turn(reply: Json, position: int) -> RecordedTurn:
    return RecordedTurn("t", array("i", [1]), array("i", [2]), reply, position)


def test_the_longest_recorded_conversation_is_found() -> None:
    first = [SYSTEM, ASK]
    second = [*first, says(calls=[CALL]), FOUND]
    turns = filed((first, says(calls=[CALL])), (second, says("17")))
    assert found([*second, says("17"), user("And?")], turns) == (4, "t1")
    assert found(second, turns) == (2, "t0")
    # A reply that was lost, or is not the model's: the turn before it is continued.
    assert found([*second, says("18"), user("And?")], turns) == (2, "t0")
    assert found([*first, says("17"), user("And?")], turns) is None
    assert found(first, turns) is None


def test_replies_with_calls_are_known_by_their_ids() -> None:
    reply = says("I look. ", [CALL, CALL_TOO], reasoning="hm")
    turns = filed(([ASK], reply))
    echoed = deepcopy(reply)
    del echoed["reasoning"]
    echoed["content"] = None
    echoed["tool_calls"][0]["function"]["arguments"] = '{ "city":"Oslo","item":"lamp" }'
    assert found([ASK, echoed, FOUND], turns) == (1, "t0")
    other = deepcopy(echoed)
    other["tool_calls"][0]["id"] = "another"
    assert found([ASK, other, FOUND], turns) is None
    assert found([ASK, says("I look. ", [CALL_TOO, CALL]), FOUND], turns) is None


def test_parallel_samples_with_equal_calls_stay_apart() -> None:
    one, two = says(calls=[call(1, item="lamp")]), says(calls=[call(2, item="lamp")])
    turns = filed(([ASK], one), ([ASK], two))
    assert found([ASK, two, result(2, "17")], turns) == (1, "t1")
    assert found([ASK, one, result(1, "17")], turns) == (1, "t0")


def test_replies_without_calls_are_known_by_their_trimmed_text() -> None:
    turns = filed(([ASK], says("\n\n17 lamps ", reasoning="hm")))
    parts: Any = [{"type": "text", "text": "17 "}, {"type": "text", "text": "lamps"}]
    for content in ("17 lamps", " 17 lamps\n", parts):
        assert found([ASK, says(content), user("And?")], turns) == (1, "t0")
    assert found([ASK, says("17  lamps"), user("And?")], turns) is None
    empty = filed(([ASK], says("")))
    assert found([ASK, says(None), user("And?")], empty) == (1, "t0")


def test_calls_without_ids_are_known_by_what_they_say() -> None:
    bare = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    turns = filed(([ASK], says(calls=[bare])))
    respelled = {"type": "function", "function": {"name": "f", "arguments": '{"b":2,"a":1}'}}
    assert found([ASK, says(calls=[respelled]), FOUND], turns) == (1, "t0")


def test_tools_and_template_arguments_are_part_of_the_key() -> None:
    turns = filed(([ASK], says("17")))
    messages = [ASK, says("17"), user("And?")]
    assert found(messages, turns) == (1, "t0")
    frames = [
        RenderOptions(TOOLS),
        RenderOptions(None),
        RenderOptions([]),
        RenderOptions(TOOLS, {"enable_thinking": False}),
        RenderOptions(TOOLS, add_generation_prompt=False),
    ]
    assert len({frame.key for frame in frames}) == len(frames)
    for frame in frames[1:]:
        assert found(messages, turns, frame.key) is None


def test_frames_of_anything_that_json_can_hold_have_keys() -> None:
    huge = {"n": 2**70, "s": "\ud800"}
    assert (
        RenderOptions(None, huge).key
        == RenderOptions(None, dict(huge)).key
        != RenderOptions(None, {"n": 2**70}).key
    )


@pytest.mark.parametrize(
    "changed",
    [
        user("How many lamps"),
        user("How many lamps? "),
        {"role": "system", "content": "How many lamps?"},
        {"role": "tool", "content": "How many lamps?", "tool_call_id": "x"},
        {"role": "user", "content": "How many lamps?", "name": "ann"},
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "How many lamps?"}}],
        },
    ],
)
def test_every_other_message_must_be_the_same(changed: Json) -> None:
    turns = filed(([ASK], says("17")))
    assert found([changed, says("17"), user("And?")], turns) is None


def test_parts_of_text_are_the_text_that_the_template_gets() -> None:
    turns = filed(([user("a\nb")], says("17")))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert found([{"role": "user", "content": parts}, says("17"), ASK], turns) == (1, "t0")


def test_a_line_that_changes_with_every_request_is_not_looked_at() -> None:
    head = "x-anthropic-billing-header: cch=%d\nBe careful."
    first, later = ([{"role": "system", "content": head % n}, ASK] for n in (1, 2))
    assert found([*later, says("17"), ASK], filed((first, says("17")))) == (2, "t0")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (result(1, "a"), result(1, "acall00001") | {"tool_call_id": ""}),
        (user("aNone"), user("a") | {"name": "NoneNone"}),
        (says("ab"), says("a") | {"role": "assistantb"}),
        (says(calls=[CALL | {"id": "ab"}]), says(calls=[CALL | {"id": "a"}, CALL | {"id": "b"}])),
        (says("ids1:a"), says(calls=[CALL | {"id": "a"}])),
    ],
)
def test_fields_do_not_run_into_one_another(one: Json, other: Json) -> None:
    assert (
        hash_conversation([one], FRAME).prefix_hashes
        != hash_conversation([other], FRAME).prefix_hashes
    )


TEXTS = st.text(alphabet="ab:1\x00é", max_size=4)
MESSAGES = st.lists(
    st.one_of(
        st.builds(user, TEXTS),
        st.builds(says, TEXTS),
        st.builds(lambda t, i: {"role": "tool", "tool_call_id": i, "content": t}, TEXTS, TEXTS),
        st.builds(lambda i: says(calls=[CALL | {"id": i}]), TEXTS.filter(bool)),
    ),
    max_size=4,
)


def _meant(messages: list[Json]) -> str:
    """What must differ where keys differ, written plainly."""
    return json.dumps(
        [
            [call["id"] for call in message["tool_calls"]]
            if "tool_calls" in message
            else {**message, "content": message["content"].strip()}
            if message["role"] == "assistant"
            else message
            for message in messages
        ],
        sort_keys=True,
    )


@given(MESSAGES, MESSAGES)
def test_keys_are_equal_exactly_where_conversations_are(a: list[Json], b: list[Json]) -> None:
    marks = hash_conversation(a, FRAME).prefix_hashes, hash_conversation(b, FRAME).prefix_hashes
    for length in range(1, min(len(a), len(b)) + 1):
        same = _meant(a[:length]) == _meant(b[:length])
        assert (marks[0][length - 1] == marks[1][length - 1]) == same


@given(MESSAGES)
def test_a_conversation_grows_by_its_reply(messages: list[Json]) -> None:
    reply = says("17")
    assert hash_conversation(messages, FRAME).with_reply(reply) == hash_conversation(
        [*messages, reply], FRAME
    )


CALLED = says("I look. ", [call(1, item="lamp", n=1, ok=True)], reasoning=" hm\n")
SAID = says(" 17\n", reasoning="hm")


def respelled(arguments: Any) -> Json:
    reply = deepcopy(CALLED)
    reply["tool_calls"][0]["function"]["arguments"] = arguments
    return reply


@pytest.mark.parametrize(
    "echoed",
    [
        CALLED,
        {"role": "assistant", "tool_calls": CALLED["tool_calls"]},
        CALLED | {"content": "I look."},
        CALLED | {"content": "", "reasoning": "hm"},
        CALLED | {"reasoning": None, "reasoning_content": "hm"},
        CALLED | {"content": [{"type": "text", "text": "I "}, {"type": "text", "text": "look."}]},
        respelled('{"ok":true, "n":1,\n"item":"l\\u0061mp"}'),
        respelled('{"ok":true,"n":1.0,"item":"lamp"}'),
        respelled({"ok": True, "n": 1, "item": "lamp"}),
    ],
)
def test_a_reply_may_come_back_written_otherwise(echoed: Json) -> None:
    assert reply_difference(CALLED, echoed) is None


@pytest.mark.parametrize(
    ("echoed", "reason"),
    [
        (CALLED | {"content": "I looked."}, ForkReason.EDITED_CONTENT),
        (CALLED | {"reasoning": "hm hm"}, ForkReason.EDITED_REASONING),
        (CALLED | {"tool_calls": []}, ForkReason.EDITED_CALLS),
        (CALLED | {"tool_calls": CALLED["tool_calls"] * 2}, ForkReason.EDITED_CALLS),
        (respelled('{"ok":true,"n":1}'), ForkReason.EDITED_CALLS),
        (respelled('{"ok":1,"n":1,"item":"lamp"}'), ForkReason.EDITED_CALLS),
        (respelled('{"ok":true,"n":"1","item":"lamp"}'), ForkReason.EDITED_CALLS),
        (respelled("{"), ForkReason.EDITED_CALLS),
        (respelled(""), ForkReason.EDITED_CALLS),
        (user("I look."), ForkReason.EDITED_HISTORY),
    ],
)
def test_a_reply_with_another_content_is_another_reply(echoed: Json, reason: ForkReason) -> None:
    assert reply_difference(CALLED, echoed) == reason


def test_a_text_must_come_back_where_there_is_no_call_to_know_it_by() -> None:
    assert reply_difference(SAID, says("17")) is None
    assert reply_difference(SAID, says(None)) == ForkReason.EDITED_CONTENT
    assert reply_difference(says(None), says("")) is None


@pytest.mark.parametrize(
    ("spelled", "same", "other"),
    [
        ('{"a": 1', '{"a": 1', '{"a":1'),
        ("", "{}", "[]"),
        ('{"n": 9007199254740993123}', '{"n":9007199254740993000}', '{"n":9007199254740990000}'),
        ('{"n": 1e3}', '{"n":1000}', '{"n":1001}'),
        ('{"n": 0.1}', '{"n":0.10}', '{"n":0.11}'),
        ("[" * 100_000, "[" * 100_000, "[" * 99_999),
    ],
)
def test_arguments_are_compared_as_values(spelled: str, same: str, other: str) -> None:
    assert reply_difference(respelled(spelled), respelled(same)) is None
    assert reply_difference(respelled(spelled), respelled(other)) == ForkReason.EDITED_CALLS


def test_names_of_calls_must_be_the_same_and_ids_need_not() -> None:
    echoed = deepcopy(CALLED)
    echoed["tool_calls"][0]["id"] = "another"
    assert reply_difference(CALLED, echoed) is None
    echoed["tool_calls"][0]["function"]["name"] = "another"
    assert reply_difference(CALLED, echoed) == ForkReason.EDITED_CALLS


def test_the_conversation_goes_on_with_what_was_recorded() -> None:
    recorded = says("I look.", [CALL], reasoning="hm")
    final = says(" 17 ", reasoning="so")
    incoming = [ASK, says(None, [CALL]), FOUND, says("17"), user("And?")]
    reported = with_recorded_replies(incoming, [turn(recorded, 1), turn(final, 3)])
    assert reported == [ASK, recorded, FOUND, final, user("And?")]
    assert incoming[1] == says(None, [CALL])


def test_two_calls_that_come_back_with_one_id_fork() -> None:
    recorded = says("I look.", [CALL, CALL_TOO])
    one_id = [{**each, "id": CALL_TOO["id"]} for each in (CALL, CALL_TOO)]
    incoming = [ASK, says("I look.", one_id), FOUND, user("And?")]
    fork = PromptFork(ForkReason.EDITED_CALLS, "message 1")
    assert with_recorded_replies(incoming, [turn(recorded, 1)]) == fork


def test_calls_without_ids_change_no_other_message() -> None:
    recorded = says("I look.", [CALL])
    without = {name: value for name, value in CALL.items() if name != "id"}
    incoming = [ASK, says("I look.", [without]), user("And?")]
    assert with_recorded_replies(incoming, [turn(recorded, 1)]) == [ASK, recorded, user("And?")]


def test_an_edited_reply_anywhere_in_the_chain_forks() -> None:
    incoming = [ASK, says(calls=[call(1, item="bulb")]), FOUND, says("17"), user("And?")]
    chain = [turn(says(calls=[call(1, item="lamp")]), 1), turn(says("17"), 3)]
    assert with_recorded_replies(incoming, chain) == PromptFork(
        ForkReason.EDITED_CALLS, "message 1"
    )


def known(*messages: Json, frame: bytes = FRAME) -> HashedConversation:
    return hash_conversation(list(messages), frame)


def test_a_conversation_that_continues_nothing_says_why() -> None:
    reply, second = says(calls=[CALL]), says("17")
    recorded = [known(SYSTEM, ASK, reply), known(SYSTEM, ASK, reply, FOUND, second)]
    more = user("And?")
    cases = {
        ForkReason.NEW_CONVERSATION: known(SYSTEM, user("another task")),
        ForkReason.TOOLS_CHANGED: known(SYSTEM, ASK, reply, FOUND, frame=RenderOptions().key),
        ForkReason.COMPACTION: known(SYSTEM, user("summary"), says("noted"), more),
        ForkReason.EDITED_HISTORY: known(SYSTEM, user("other"), reply, FOUND, second, more),
    }
    for reason, incoming in cases.items():
        assert fork_reason_of_miss(incoming, recorded) == reason
    assert fork_reason_of_miss(cases[ForkReason.COMPACTION], []) is None
    for reason, incoming in cases.items():
        again = fork_reason_of_miss(incoming, recorded, refused=[incoming])
        assert again == reason, "refused, and sent again as it was"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, None),
        ({"continue_final_message": False, "echo": False}, None),
        ({"echo": True}, "echo"),
        ({"chat_template": "x"}, "chat_template"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"truncate_prompt_tokens": 100}, "truncate_prompt_tokens"),
    ],
)
def test_requests_that_the_engine_renders_otherwise_are_known(body: Json, field: Any) -> None:
    assert custom_rendering_field(body) == field


def test_a_frame_is_made_of_a_request_and_the_engines_defaults() -> None:
    body = {"tools": TOOLS, "reasoning_effort": "low", "chat_template_kwargs": {"style": "x"}}
    frame = render_options(body, {"style": "default", "enable_thinking": False})
    assert frame.kwargs == {"style": "x", "enable_thinking": True, "reasoning_effort": "low"}
    assert frame.tools == TOOLS
    assert frame.add_generation_prompt


# Clients that rewrite ids.


def rewritten(messages: Sequence[Json], names: dict[str, str]) -> list[Json]:
    """As a framework does it that wants ids of its own form, in calls and in their results."""
    out = deepcopy(list(messages))
    for message in out:
        if message.get("tool_call_id") in names:
            message["tool_call_id"] = names[message["tool_call_id"]]
        for entry in message.get("tool_calls") or ():
            entry["id"] = names.get(entry["id"], entry["id"])
    return out


def by_text(messages: Sequence[Json], recorded: HashedConversation) -> list[int]:
    keys = hash_conversation(messages, FRAME).reply_text_keys()
    return [position for position, key in keys if key == recorded.text_key]


def test_rewritten_ids_are_found_by_what_was_said() -> None:
    first = [ASK, says("I look.", [CALL])]
    second = [*first, FOUND, says("Again.", [CALL_TOO])]
    sent = rewritten([*second, result(2, "4")], {CALL["id"]: "call_0", CALL_TOO["id"]: "call_1"})
    recorded = known(*second)
    assert recorded.key not in [key for _, key in hash_conversation(sent, FRAME).reply_keys()]
    assert by_text(sent, recorded) == [3]
    assert by_text(sent, known(*first)) == [1]
    sent[3]["tool_calls"][0]["function"]["arguments"] = '{"item": "chair"}'
    assert by_text(sent, recorded) == []


def test_both_keys_are_those_of_a_conversation_that_is_hashed_at_once() -> None:
    messages = [SYSTEM, ASK, says("17"), user("And?"), says("I look.", [CALL]), FOUND, says("4")]
    at_once = hash_conversation(messages, FRAME)
    _ = at_once.prefix_hashes, at_once.text_hashes
    for length in range(1, len(messages)):
        if messages[length]["role"] != "assistant":
            continue
        grown = hash_conversation(messages[:length], FRAME)
        earlier = [n for n in range(1, length) if messages[n]["role"] == "assistant"]
        if earlier:
            grown.continues(known(*messages[: earlier[-1] + 1]))
        grown = grown.with_reply(messages[length])
        assert grown.prefix_hashes == at_once.prefix_hashes[: length + 1]
        assert grown.text_hashes == at_once.text_hashes[: length + 1]
        assert grown.content_hashes == at_once.content_hashes[: length + 1]
    assert at_once.text_hashes[4] != at_once.prefix_hashes[4]
    assert at_once.text_hashes[:4] == at_once.prefix_hashes[:4]


def test_results_get_the_ids_that_were_given_out() -> None:
    reply = says(None, [CALL, CALL_TOO])
    swapped = {CALL["id"]: CALL_TOO["id"], CALL_TOO["id"]: CALL["id"]}
    for names in ({CALL["id"]: "call_0", CALL_TOO["id"]: "call_1"}, swapped):
        more = [says("done"), {"role": "tool", "tool_call_id": "call_0", "content": "later"}]
        sent = rewritten([ASK, reply, result(2, "4"), result(1, "17")], names) + more
        restored = with_recorded_replies(sent, [turn(reply, 1)])
        assert restored == [ASK, reply, result(2, "4"), result(1, "17"), *more]
    one = rewritten([ASK, reply, FOUND], {CALL["id"]: "call_0", CALL_TOO["id"]: "call_0"})
    assert with_recorded_replies(one, [turn(reply, 1)]) == PromptFork(
        ForkReason.EDITED_CALLS, "message 1"
    )


@pytest.mark.parametrize(
    "messages",
    [[], [ASK], [SYSTEM, ASK, says("Two."), user("And more?")], [ASK, says("", [CALL]), FOUND]],
)
def test_another_process_makes_the_same_keys_of_its_values(messages: list[Json]) -> None:
    said = hash_conversation(messages, FRAME).with_reply(says("", [CALL_TOO]))
    values = marshal.loads(marshal.dumps(said.as_values()))
    again = HashedConversation.of_values(values)
    for one, other in ((said, again), (said.with_reply(says("a")), again.with_reply(says("a")))):
        assert (other.key, other.text_key, other.prompt_key) == (
            one.key,
            one.text_key,
            one.prompt_key,
        )
        assert other.content_hashes == one.content_hashes
        assert list(other.reply_text_keys()) == list(one.reply_text_keys())
