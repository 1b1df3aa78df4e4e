"""The clock, the tools and the earlier turns: a chain continues only as it was sent."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from support.chat.conversations import CALL, FOUND, TOOLS, call, result, says
from support.chat.generated_templates import Parts, friendly, model_of
from support.chat.real_templates import FAMILIES, fresh_ids, model
from support.proxy.splice import ASK, MORE, NOW, Json, continued, new_text, reason
from tracegrad.chat.call import RecordedTurn
from tracegrad.chat.messages import RenderOptions
from tracegrad.chat.model import ChatFormat
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason, PromptFork
from tracegrad.proxy.prompt_reuse.splice import SplicedPrompt, splice_prompt


def test_a_clock_that_went_on_forks_and_the_roots_does_not() -> None:
    parts = friendly(head="date")
    assert (
        reason(
            continued(
                parts, says("17"), [MORE], "17<|end|>", clock=datetime(2026, 11, 21, tzinfo=UTC)
            )
        )
        == ForkReason.NOT_AS_SENT
    )
    assert new_text(continued(parts, says("17"), [MORE], "17<|end|>"))


def test_tools_are_rendered_as_they_were() -> None:
    parts = friendly(head="tools")
    done = continued(
        parts, says(calls=[CALL]), [FOUND], "x<|end|>", frame=RenderOptions(tools=TOOLS)
    )
    assert new_text(done) == "<|tool|>17 pieces<|end|><|assistant|>"
    text, _, turn = done[1], done[0], done[2]
    other = splice_prompt(text, [turn], [ASK, turn.reply, FOUND], RenderOptions(), NOW)
    assert isinstance(other, PromptFork)
    assert other.reason == ForkReason.NOT_AS_SENT


def chain_of_three(parts: Parts) -> tuple[ChatFormat, list[RecordedTurn], list[Json]]:
    text = model_of(parts.source)
    messages, chain = [ASK], []
    prompt = fresh_ids(text, messages, RenderOptions(), NOW)
    for step in range(3):
        reply = says(calls=[call(step, item="lamp")], reasoning="hm")
        sampled = text.tokenizer.encode(f'<think>hm</think> {{"item" :"lamp {step}"}}<|end|>')
        chain.append(RecordedTurn(f"t{step}", prompt, sampled, reply, len(messages), "tool_calls"))
        messages = [*messages, reply, result(step, "17")]
        spliced = splice_prompt(text, chain, messages, RenderOptions(), NOW)
        assert isinstance(spliced, SplicedPrompt)
        prompt = spliced.ids
    return text, chain, messages


def test_a_chain_whose_prompts_the_template_does_not_give_any_more_forks() -> None:
    text, chain, messages = chain_of_three(friendly(head="date"))
    assert isinstance(splice_prompt(text, chain, messages, RenderOptions(), NOW), SplicedPrompt)
    later = splice_prompt(text, chain, messages, RenderOptions(), NOW + timedelta(days=42))
    assert isinstance(later, PromptFork)
    assert later.reason == ForkReason.NOT_AS_SENT
    changed = [messages[0], messages[1], result(0, "18"), *messages[3:]]
    edited = splice_prompt(text, chain, changed, RenderOptions(), NOW)
    assert isinstance(edited, PromptFork)
    assert edited.reason == ForkReason.NOT_AS_SENT


def test_a_chain_needs_all_of_its_turns() -> None:
    text, chain, messages = chain_of_three(friendly())
    fork = splice_prompt(text, [chain[0], chain[2]], messages, RenderOptions(), NOW)
    assert isinstance(fork, PromptFork)
    assert fork.reason == ForkReason.NOT_AS_SENT


def test_a_chain_that_was_sent_less_than_the_conversation_holds_forks() -> None:
    text, chain, messages = chain_of_three(friendly(opening="none"))
    last = replace(chain[2], reply_index=chain[2].reply_index + 1)
    more = [*messages[: last.reply_index - 1], MORE, *messages[last.reply_index - 1 :]]
    assert more[last.reply_index] == last.reply
    fork = splice_prompt(text, [*chain[:2], last], more, RenderOptions(), NOW)
    assert isinstance(fork, PromptFork)
    assert fork.reason == ForkReason.NOT_AS_SENT


def test_a_turn_cut_short_in_the_middle_of_a_chain_is_passed_over() -> None:
    text = model_of(friendly().source)
    messages = [ASK, says("There are 1"), MORE]
    cut = RecordedTurn(
        "t0",
        fresh_ids(text, [ASK], RenderOptions(), NOW),
        text.tokenizer.encode("There are 1"),
        messages[1],
        1,
        "length",
    )
    first = splice_prompt(text, [cut], messages, RenderOptions(), NOW)
    assert isinstance(first, SplicedPrompt)
    turn = RecordedTurn("t1", first.ids, text.tokenizer.encode("4<|end|>"), says("4"), 3, "stop")
    messages += [turn.reply, ASK]
    second = splice_prompt(text, [cut, turn], messages, RenderOptions(), NOW)
    assert isinstance(second, SplicedPrompt)
    assert second.ids == fresh_ids(text, messages, RenderOptions(), NOW)


@pytest.mark.parametrize(
    ("name", "engines", "more"),
    [
        ("Qwen3.5", {"enable_thinking": False}, []),
        ("DeepSeek-V3.1", {"thinking": True}, [MORE]),
    ],
)
def test_an_engine_with_other_template_arguments_is_not_continued(
    name: str, engines: Json, more: list[Json]
) -> None:
    """Started with --default-chat-template-kwargs. Its root goes on as the template does from
    arguments that are not its own, but for the words before the reply."""
    text, frame = model(name), RenderOptions(TOOLS)
    stop = FAMILIES[name].stop[True]
    messages = [ASK, says(calls=[call(0, item="lamp")]), result(0, "17"), *more]
    prompt = fresh_ids(text, [ASK], RenderOptions(TOOLS, engines), NOW)
    rendered = fresh_ids(text, messages, frame, NOW)
    assert text.tokenizer.decode(rendered).startswith(text.tokenizer.decode(prompt))
    assert rendered != fresh_ids(text, messages, RenderOptions(TOOLS, engines), NOW)
    sampled = text.tokenizer.encode('{"item": "lamp"}' + stop)
    root = RecordedTurn("t0", prompt, sampled, messages[1], 1, "tool_calls")
    fork = splice_prompt(text, [root], messages, frame, NOW)
    assert isinstance(fork, PromptFork)
    assert fork.reason == ForkReason.NOT_AS_SENT
    # With the engine's own it is continued.
    own = splice_prompt(text, [root], messages, RenderOptions(TOOLS, engines), NOW)
    assert isinstance(own, SplicedPrompt)


def test_a_chain_of_such_an_engine_that_was_continued_before_is_not_any_more() -> None:
    text, frame = model("Qwen3.5"), RenderOptions(TOOLS)
    ask = says(calls=[call(0, item="lamp")])
    prompt = fresh_ids(text, [ASK], RenderOptions(TOOLS, {"enable_thinking": False}), NOW)
    call_text = "<function=stock>\n<parameter=item>\nlamp\n</parameter>\n</function>"
    sampled = text.tokenizer.encode(f"<tool_call>\n{call_text}\n</tool_call><|im_end|>")
    root = RecordedTurn("t0", prompt, sampled, ask, 1, "tool_calls")
    messages = [ASK, ask, result(0, "17")]
    # As it was put together when nobody looked at the root's last words.
    whole = text.tokenizer.decode(fresh_ids(text, messages, frame, NOW))
    new = whole.rpartition("</tool_call><|im_end|>")[2]
    spliced = prompt + sampled + text.tokenizer.encode(new)
    again = says(calls=[call(1, item="lamp")])
    turn = RecordedTurn("t1", spliced, sampled, again, 3, "tool_calls")
    messages += [again, result(1, "4")]
    fork = splice_prompt(text, [root, turn], messages, frame, NOW)
    assert isinstance(fork, PromptFork)
    assert fork.reason == ForkReason.NOT_AS_SENT
    # It is looked at once.
    known = splice_prompt(text, [root, turn], messages, frame, NOW, unproven=None)
    assert isinstance(known, SplicedPrompt)
