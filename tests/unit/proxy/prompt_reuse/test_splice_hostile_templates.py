"""Hostile templates: each forks, with the reason why it cannot be continued."""

from __future__ import annotations

from typing import Any

import pytest

from support.chat.conversations import CALL, FOUND, call, says
from support.chat.generated_templates import friendly, model_of
from support.chat.real_templates import fresh_ids
from support.proxy.splice import ASK, MORE, NOW, continued, new_text, reason
from tracegrad.chat.call import RecordedTurn
from tracegrad.chat.messages import RenderOptions
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason, PromptFork
from tracegrad.proxy.prompt_reuse.splice import splice_prompt


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"head": "count"}, ForkReason.HISTORY_REWRITTEN),
        ({"head": "last"}, ForkReason.HISTORY_REWRITTEN),
        ({"user": "last_differs"}, ForkReason.HISTORY_REWRITTEN),
        ({"opening": "stub"}, ForkReason.GENERATION_PROMPT),
        ({"reasoning": "none"}, ForkReason.REASONING_DROPPED),
        ({"reasoning": "last_only"}, ForkReason.REASONING_DROPPED),
        ({"end": "not_after_calls"}, ForkReason.TEMPLATE),
        ({"end": "not_before_last"}, ForkReason.TEMPLATE),
        ({"end": "none"}, ForkReason.TEMPLATE),
        ({"result": "echo_before"}, ForkReason.TEMPLATE),
        ({"result": "echo_after"}, ForkReason.TEMPLATE),
        ({"result": "echo_only"}, ForkReason.TEMPLATE),
        ({"closing": "long"}, ForkReason.TEMPLATE),
        ({"closing": "short"}, ForkReason.HISTORY_REWRITTEN),
        ({"closing": "count"}, ForkReason.HISTORY_REWRITTEN),
        ({"closing": "said"}, ForkReason.TEMPLATE),
        ({"end": "not_after_calls", "result": "only_a_header"}, ForkReason.TEMPLATE),
        ({"text": "shouted"}, ForkReason.TEMPLATE),
    ],
)
def test_a_hostile_template_forks(changed: Any, expected: ForkReason) -> None:
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
def test_a_template_that_looks_at_earlier_messages_forks(found: str, put: str) -> None:
    source = friendly().source
    assert found in source
    text = model_of(source.replace(found, put))
    prompt = fresh_ids(text, [ASK], RenderOptions(), NOW)
    turn = RecordedTurn("t", prompt, text.tokenizer.encode("17<|end|>"), says("17"), 1, "stop")
    fork = splice_prompt(text, [turn], [ASK, turn.reply, MORE], RenderOptions(), NOW)
    assert isinstance(fork, PromptFork)
    assert fork.reason in (ForkReason.TEMPLATE, ForkReason.HISTORY_REWRITTEN)


def test_content_that_the_template_cuts_forks() -> None:
    text = "I think</think>17"
    done = continued(friendly(text="split"), says(text), [MORE], f"{text}<|end|>")
    assert reason(done) == ForkReason.CONTENT_CHANGED


def test_reasoning_that_is_shown_is_kept_until_a_new_user_message_drops_it() -> None:
    parts, reply = friendly(reasoning="recent"), says(calls=[CALL], reasoning="I look it up")
    sampled = "<think>I look it up</think><tool_call>{}<|end|>"
    assert new_text(continued(parts, reply, [FOUND], sampled)).startswith("<|tool|>17")
    done = continued(parts, reply, [FOUND, MORE], sampled)
    assert reason(done) == ForkReason.REASONING_DROPPED
    before = [ASK, says(calls=[CALL], reasoning="I look it up"), FOUND]
    later = continued(parts, says("17"), [MORE], "17<|end|>", before=before)
    assert later[0] == PromptFork(
        ForkReason.HISTORY_REWRITTEN, "the reasoning of an earlier reply is left out"
    )


def test_a_template_that_refuses_the_new_messages_forks_with_its_words() -> None:
    source = (
        friendly().source + "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}"
    )
    text = model_of(source + "{% endif %}")
    prompt = fresh_ids(text, [ASK], RenderOptions(), NOW)
    turn = RecordedTurn("t", prompt, text.tokenizer.encode("x<|end|>"), says(calls=[CALL]), 1)
    fork = splice_prompt(text, [turn], [ASK, turn.reply, FOUND], RenderOptions(), NOW)
    assert fork == PromptFork(ForkReason.TEMPLATE_ERROR, "no tools")
