"""Hostile templates: each forks, with the reason why it cannot be continued."""

from __future__ import annotations

from typing import Any

import pytest

from support.chat.conversations import CALL, FOUND, call, says
from support.chat.generated_templates import friendly, model_of
from support.chat.real_templates import fresh_ids
from support.proxy.splice import ASK, MORE, NOW, continued, new_text, reason
from tracegrad.chat.messages import Frame
from tracegrad.chat.recorded_turn import RecordedTurn
from tracegrad.proxy.prompt_reuse.fork_reasons import Fork, Reason
from tracegrad.proxy.prompt_reuse.splice import splice


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"head": "count"}, Reason.HISTORY_REWRITTEN),
        ({"head": "last"}, Reason.HISTORY_REWRITTEN),
        ({"user": "last_differs"}, Reason.HISTORY_REWRITTEN),
        ({"opening": "stub"}, Reason.GENERATION_PROMPT),
        ({"reasoning": "none"}, Reason.REASONING_DROPPED),
        ({"reasoning": "last_only"}, Reason.REASONING_DROPPED),
        ({"end": "not_after_calls"}, Reason.TEMPLATE),
        ({"end": "not_before_last"}, Reason.TEMPLATE),
        ({"end": "none"}, Reason.TEMPLATE),
        ({"result": "echo_before"}, Reason.TEMPLATE),
        ({"result": "echo_after"}, Reason.TEMPLATE),
        ({"result": "echo_only"}, Reason.TEMPLATE),
        ({"closing": "long"}, Reason.TEMPLATE),
        ({"closing": "short"}, Reason.HISTORY_REWRITTEN),
        ({"closing": "count"}, Reason.HISTORY_REWRITTEN),
        ({"closing": "said"}, Reason.TEMPLATE),
        ({"end": "not_after_calls", "result": "only_a_header"}, Reason.TEMPLATE),
        ({"text": "shouted"}, Reason.TEMPLATE),
    ],
)
def test_a_hostile_template_forks(changed: Any, expected: Reason) -> None:
    reply = says("look", [call(1, item="a red lamp", city="in Bergen, north")], reasoning="hm")
    done = continued(friendly(**changed), reply, [FOUND], "<tool_call>{}<|end|>")
    assert reason(done) == expected


@pytest.mark.parametrize(
    ("found", "put"),
    [
        # What precedes a short reply, and what it says, as seen in the marks for it, differ.
        ("<s>", "<s>{% for m in messages %}{% if m.content|length > 14 %}!{% endif %}{% endfor %}"),
        (
            "{{ m.content }}{%",
            "{{ m.content }}{% if m.content == '17' %}{{ messages[-1].content }}{% endif %}{%",
        ),
        ("{{ m.content }}<|end|>", "{% if messages|length > 2 %}{{ m.content }}{% endif %}<|end|>"),
    ],
)
def test_a_template_that_looks_at_what_was_said_forks(found: str, put: str) -> None:
    source = friendly().source
    assert found in source
    text = model_of(source.replace(found, put))
    prompt = fresh_ids(text, [ASK], Frame(), NOW)
    turn = RecordedTurn("t", prompt, text.tokenizer.encode("17<|end|>"), says("17"), 1, "stop")
    fork = splice(text, [turn], [ASK, turn.reply, MORE], Frame(), NOW)
    assert isinstance(fork, Fork)
    assert fork.reason in (Reason.TEMPLATE, Reason.HISTORY_REWRITTEN)


def test_content_that_the_template_cuts_forks() -> None:
    text = "I think</think>17"
    done = continued(friendly(text="split"), says(text), [MORE], f"{text}<|end|>")
    assert reason(done) == Reason.CONTENT_CHANGED


def test_reasoning_that_is_shown_is_kept_until_a_new_user_message_drops_it() -> None:
    parts, reply = friendly(reasoning="recent"), says(calls=[CALL], reasoning="I look it up")
    sampled = "<think>I look it up</think><tool_call>{}<|end|>"
    assert new_text(continued(parts, reply, [FOUND], sampled)).startswith("<|tool|>17")
    done = continued(parts, reply, [FOUND, MORE], sampled)
    assert reason(done) == Reason.REASONING_DROPPED
    before = [ASK, says(calls=[CALL], reasoning="I look it up"), FOUND]
    later = continued(parts, says("17"), [MORE], "17<|end|>", before=before)
    assert later[0] == Fork(
        Reason.HISTORY_REWRITTEN, "the reasoning of an earlier reply is left out"
    )


def test_a_template_that_refuses_the_new_messages_forks_with_its_words() -> None:
    source = (
        friendly().source + "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}"
    )
    text = model_of(source + "{% endif %}")
    prompt = fresh_ids(text, [ASK], Frame(), NOW)
    turn = RecordedTurn("t", prompt, text.tokenizer.encode("x<|end|>"), says(calls=[CALL]), 1)
    fork = splice(text, [turn], [ASK, turn.reply, FOUND], Frame(), NOW)
    assert fork == Fork(Reason.TEMPLATE_ERROR, "no tools")
