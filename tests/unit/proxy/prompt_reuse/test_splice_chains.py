"""The clock, the tools and the earlier turns: a chain continues only as it was sent."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from support.chat.conversations import CALL, FOUND, TOOLS, call, result, says
from support.chat.generated_templates import Parts, friendly, model_of
from support.chat.real_templates import fresh_ids
from support.proxy.splice import ASK, MORE, NOW, Json, continued, new_text, reason
from tracegrad.chat.messages import Frame
from tracegrad.chat.model import ModelText
from tracegrad.chat.recorded_turn import RecordedTurn
from tracegrad.proxy.prompt_reuse.fork_reasons import Fork, Reason
from tracegrad.proxy.prompt_reuse.splice import Spliced, splice


def test_a_clock_that_went_on_forks_and_the_roots_does_not() -> None:
    parts = friendly(head="date")
    assert (
        reason(
            continued(
                parts, says("17"), [MORE], "17<|end|>", clock=datetime(2026, 11, 21, tzinfo=UTC)
            )
        )
        == Reason.NOT_AS_SENT
    )
    assert new_text(continued(parts, says("17"), [MORE], "17<|end|>"))


def test_tools_are_rendered_as_they_were() -> None:
    parts = friendly(head="tools")
    done = continued(parts, says(calls=[CALL]), [FOUND], "x<|end|>", frame=Frame(tools=TOOLS))
    assert new_text(done) == "<|tool|>17 pieces<|end|><|assistant|>"
    text, _, turn = done[1], done[0], done[2]
    other = splice(text, [turn], [ASK, turn.reply, FOUND], Frame(), NOW)
    assert isinstance(other, Fork)
    assert other.reason == Reason.NOT_AS_SENT


def chain_of_three(parts: Parts) -> tuple[ModelText, list[RecordedTurn], list[Json]]:
    text = model_of(parts.source)
    messages, chain = [ASK], []
    prompt = fresh_ids(text, messages, Frame(), NOW)
    for step in range(3):
        reply = says(calls=[call(step, item="lamp")], reasoning="hm")
        sampled = text.tokenizer.encode(f'<think>hm</think> {{"item" :"lamp {step}"}}<|end|>')
        chain.append(RecordedTurn(f"t{step}", prompt, sampled, reply, len(messages), "tool_calls"))
        messages = [*messages, reply, result(step, "17")]
        spliced = splice(text, chain, messages, Frame(), NOW)
        assert isinstance(spliced, Spliced)
        prompt = spliced.ids
    return text, chain, messages


def test_a_chain_whose_prompts_the_template_does_not_give_any_more_forks() -> None:
    text, chain, messages = chain_of_three(friendly(head="date"))
    assert isinstance(splice(text, chain, messages, Frame(), NOW), Spliced)
    later = splice(text, chain, messages, Frame(), NOW + timedelta(days=42))
    assert isinstance(later, Fork)
    assert later.reason == Reason.NOT_AS_SENT
    changed = [messages[0], messages[1], result(0, "18"), *messages[3:]]
    edited = splice(text, chain, changed, Frame(), NOW)
    assert isinstance(edited, Fork)
    assert edited.reason == Reason.NOT_AS_SENT


def test_a_chain_needs_all_of_its_turns() -> None:
    text, chain, messages = chain_of_three(friendly())
    fork = splice(text, [chain[0], chain[2]], messages, Frame(), NOW)
    assert isinstance(fork, Fork)
    assert fork.reason == Reason.NOT_AS_SENT


def test_a_chain_that_was_sent_less_than_the_conversation_holds_forks() -> None:
    text, chain, messages = chain_of_three(friendly(opening="none"))
    last = replace(chain[2], position=chain[2].position + 1)
    more = [*messages[: last.position - 1], MORE, *messages[last.position - 1 :]]
    assert more[last.position] == last.reply
    fork = splice(text, [*chain[:2], last], more, Frame(), NOW)
    assert isinstance(fork, Fork)
    assert fork.reason == Reason.NOT_AS_SENT


def test_a_turn_cut_short_in_the_middle_of_a_chain_is_passed_over() -> None:
    text = model_of(friendly().source)
    messages = [ASK, says("There are 1"), MORE]
    cut = RecordedTurn(
        "t0",
        fresh_ids(text, [ASK], Frame(), NOW),
        text.tokenizer.encode("There are 1"),
        messages[1],
        1,
        "length",
    )
    first = splice(text, [cut], messages, Frame(), NOW)
    assert isinstance(first, Spliced)
    turn = RecordedTurn("t1", first.ids, text.tokenizer.encode("4<|end|>"), says("4"), 3, "stop")
    messages += [turn.reply, ASK]
    second = splice(text, [cut, turn], messages, Frame(), NOW)
    assert isinstance(second, Spliced)
    assert second.ids == fresh_ids(text, messages, Frame(), NOW)
