"""Random templates, friendly and hostile, random conversations, tokens as no tokenizer makes them.

A template that is asked says itself where a reply ends (`exact_grown`): every prompt that is
continued must be cut there, begin with the recorded tokens, and hold the model's own text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.chat.conversations import call, result, says, user
from support.chat.generated_templates import SEAM, Parts, friendly, grown, model_of
from support.chat.tokenizers import KINDS
from tracegrad.chat.call import RecordedTurn
from tracegrad.chat.messages import RenderOptions, engine_message
from tracegrad.chat.model import ChatFormat
from tracegrad.proxy.prompt_reuse.splice import SplicedPrompt, splice_prompt

Json = dict[str, Any]

NOW = datetime(2026, 11, 20, tzinfo=UTC)
UNHURRIED = [HealthCheck.too_slow, HealthCheck.data_too_large]
many = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=UNHURRIED)
far_more = settings(max_examples=5000, deadline=None, suppress_health_check=UNHURRIED)

WORDS = st.one_of(
    st.sampled_from(["ok", "  spaced out \n", "", "x</think>y", '{"a": 1}', "word " * 20, "naïve"]),
    st.sampled_from(["<|end|>", "see <|end|><|user|>", "<|tool|>", "<tool_call>", "<|assistant|>"]),
    st.text(alphabet="ab \n<|>", max_size=8),
)
VALUES = st.one_of(WORDS, st.integers(0, 99), st.booleans(), st.lists(WORDS, max_size=2))
ARGUMENTS = st.dictionaries(st.sampled_from(["item", "city", "n"]), VALUES, max_size=3)


@st.composite
def replies(draw: st.DrawFn, number: int) -> Json:
    kind = draw(st.sampled_from(["text", "call", "calls", "both"]))
    count = {"text": 0, "call": 1, "calls": 2, "both": 1}[kind]
    return says(
        draw(WORDS) if kind in ("text", "both") else None,
        [call(10 * number + i, **draw(ARGUMENTS)) for i in range(count)],
        draw(st.sampled_from(["", "", "hm", " I think\nso "])),
    )


@st.composite
def answers(draw: st.DrawFn, reply: Json) -> list[Json]:
    calls = reply.get("tool_calls") or []
    results = [result(int(call["id"][4:]), draw(WORDS)) for call in calls]
    enough = bool(results) and draw(st.booleans())
    return results if enough else [*results, user(draw(WORDS))]


@dataclass
class Episode:
    """What a proxy and an engine do with one conversation."""

    text: ChatFormat
    messages: list[Json]
    chain: list[RecordedTurn] = field(default_factory=list)

    def rendered(self, messages: Sequence[Json], **kwargs: str) -> str:
        shown = [engine_message(message, parts=False) for message in messages]
        return self.text.template.render(shown, kwargs=kwargs, now=NOW)

    def fresh(self) -> array[int]:
        self.chain = []
        return self.text.tokenizer.encode(self.rendered(self.messages))

    def seam(self, messages: Sequence[Json], position: int) -> int:
        """Where in the rendering of `messages` the reply at `position` ends, by the template."""
        earlier = sum(message["role"] == "assistant" for message in messages[:position])
        return len("".join(self.rendered(messages, seam=SEAM).split(SEAM)[: earlier + 1]))

    def go_on(
        self, prompt: array[int], sampled: array[int], reply: Json, new: list[Json], ended: str
    ) -> SplicedPrompt | None:
        position = len(self.messages)
        self.chain.append(RecordedTurn("t", prompt, sampled, reply, position, ended))
        before = self.rendered(self.messages)
        self.messages = [*self.messages, reply, *new]
        spliced = splice_prompt(self.text, self.chain, self.messages, RenderOptions(), NOW)
        if not isinstance(spliced, SplicedPrompt):
            return None
        context = prompt + sampled
        assert spliced.ids[: len(context)] == context
        assert len(spliced.ids) == len(context) + spliced.new
        tokenizer = self.text.tokenizer
        whole = self.rendered(self.messages)
        end = self.seam(self.messages, position)
        stop = tokenizer.decode(sampled[-1:]) if ended == "stop" else ""
        # With the end token before it: some tokenizers take white space off the beginning.
        news = tokenizer.decode(sampled[-1:] + spliced.ids[len(context) :])
        if ended == "stop":
            assert news == tokenizer.roundtrip(whole)[-len(news) :]
            assert tokenizer.roundtrip(whole[end:]) in (news, tokenizer.roundtrip(news))
            assert whole[end:].startswith(stop)
        else:
            added = tokenizer.decode(spliced.ids[len(context) :])
            assert added.lstrip() == whole[end:].lstrip()
            assert whole.endswith(added)
            assert whole[len(before) : end].strip().endswith(tokenizer.decode(sampled).strip())
        assert whole.startswith(before)
        return spliced


@many
@given(st.data(), grown())
def test_no_prompt_is_cut_anywhere_but_at_the_end_of_the_reply(
    data: st.DataObject, parts: Parts
) -> None:
    _play(data, parts)


@pytest.mark.slow
@far_more
@given(st.data(), grown())
def test_no_prompt_is_cut_wrongly_however_long_one_looks(data: st.DataObject, parts: Parts) -> None:
    _play(data, parts)


def _play(data: st.DataObject, parts: Parts) -> None:
    """Three replies, each continued where it can be."""
    episode = Episode(model_of(parts.source), [user(data.draw(WORDS))])
    tokenizer = episode.text.tokenizer
    prompt, verbatim = episode.fresh(), episode.rendered(episode.messages)
    for number in range(3):
        reply = data.draw(replies(number))
        new = data.draw(answers(reply))
        # Whatever the model wrote, and in tokens that an encoding would not give: one a character.
        said = data.draw(st.sampled_from(["", "as it likes", '<tool_call>{"a":1}', "  naïve\n"]))
        sampled = array("i", [i for char in said for i in tokenizer.encode(char)])
        sampled += tokenizer.encode(parts.stop)
        spliced = episode.go_on(prompt, sampled, reply, new, "stop")
        if spliced is None:
            prompt, verbatim = episode.fresh(), episode.rendered(episode.messages)
            continue
        new_text = tokenizer.decode(spliced.ids[len(spliced.ids) - spliced.new :])
        verbatim += said + parts.stop + new_text
        assert tokenizer.decode(spliced.ids) == verbatim
        prompt = spliced.ids


@many
@given(st.data(), grown(), st.sampled_from(sorted(KINDS)))
def test_what_was_sampled_as_the_template_has_it_gives_the_engines_own_prompt(
    data: st.DataObject, parts: Parts, kind: str
) -> None:
    episode = Episode(model_of(parts.source, kind), [user(data.draw(WORDS))])
    tokenizer = episode.text.tokenizer
    prompt = episode.fresh()
    for number in range(2):
        reply = data.draw(replies(number))
        new = data.draw(answers(reply))
        before = episode.rendered(episode.messages)
        reported = [*episode.messages, reply, *new]
        whole = episode.rendered(reported)
        end = episode.seam(reported, len(episode.messages))
        ids = tokenizer.encode(whole)
        # Its tokens are those of the whole prompt, where these begin as the last prompt did.
        left = tokenizer.encode(whole[:end] + parts.stop)
        if not whole.startswith(before) or left[: len(prompt)] != prompt:
            return
        if ids[: len(left)] != left or len(left) == len(prompt):
            return
        spliced = episode.go_on(prompt, left[len(prompt) :], reply, new, "stop")
        if spliced is None:
            return
        assert spliced.ids == ids
        prompt = spliced.ids


@many
@given(st.data(), grown(), WORDS)
def test_a_reply_that_was_cut_short_is_closed_as_the_template_closes_it(
    data: st.DataObject, parts: Parts, said: str
) -> None:
    episode = Episode(model_of(parts.source), [user(data.draw(WORDS))])
    reply = says(said, reasoning=data.draw(st.sampled_from(["", "", "hm"])))
    sampled = episode.text.tokenizer.encode(said) or episode.text.tokenizer.encode("a")
    episode.go_on(episode.fresh(), sampled, reply, [user(data.draw(WORDS))], "length")


@many
@given(st.data(), grown(), st.sampled_from(sorted(KINDS)))
def test_an_addition_to_a_reply_changes_nothing_before_it(
    data: st.DataObject, parts: Parts, kind: str
) -> None:
    """The prompt says what the template says of the whole conversation, but for white space."""
    text, ask, new = model_of(parts.source, kind), user(data.draw(WORDS)), user(data.draw(WORDS))
    said, stop = data.draw(WORDS), data.draw(st.sampled_from(["", "###", "</code>"]))
    echoed = said.strip() + stop + data.draw(WORDS)
    prompt = text.tokenizer.encode(_rendered(text, [ask]))
    sampled = array("i", [i for char in said + stop for i in text.tokenizer.encode(char)])
    ended: Any = ("stop", stop) if stop else ("length", None)
    turn = RecordedTurn("t", prompt, sampled, says(said), 1, *ended)
    messages = [ask, says(echoed), new]
    spliced = splice_prompt(text, [turn], messages, RenderOptions(), NOW)
    if isinstance(spliced, SplicedPrompt):
        assert spliced.ids[: len(prompt) + len(sampled)] == prompt + sampled
        shown = text.tokenizer.decode(spliced.ids[len(prompt) :])
        whole = text.tokenizer.roundtrip(_rendered(text, messages))
        before = text.tokenizer.decode(prompt)
        assert whole.startswith(before)
        mine, theirs = "".join(shown.split()), "".join(whole[len(before) :].split())
        if echoed.strip() != said.strip():
            assert mine == theirs
        # Nothing was added: a header that the model did not write is not put there.
        assert theirs.endswith(mine)


def _rendered(text: ChatFormat, messages: Sequence[Json]) -> str:
    shown = [engine_message(message, parts=False) for message in messages]
    return text.template.render(shown, now=NOW)


def test_the_friendly_template_is_continued() -> None:
    """The properties above hold of something."""
    for ended, stop in (("stop", "<|end|>"), ("length", "")):
        episode = Episode(model_of(friendly().source), [user("How many?")])
        sampled = episode.text.tokenizer.encode("17 lamps" + stop)
        spliced = episode.go_on(episode.fresh(), sampled, says("17 lamps"), [user("And?")], ended)
        assert spliced is not None
        assert spliced.ids == episode.fresh()
