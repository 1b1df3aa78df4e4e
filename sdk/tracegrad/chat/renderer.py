"""A model's prompts, and what the engine was sent of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import NamedTuple

from tracegrad.chat.call import RecordedTurn
from tracegrad.chat.messages import RenderOptions, developers_as_system, engine_message
from tracegrad.chat.model import ChatFormat
from tracegrad.chat.tokenizer import Tokenizer
from tracegrad.events import Json


class Renderer:
    """A model's prompts under one frame and clock."""

    def __init__(self, text: ChatFormat, frame: RenderOptions, now: datetime) -> None:
        self.tokenizer = text.tokenizer
        self.end_tokens = text.end_tokens
        self._template = text.template_for(frame.tools)
        self._frame = frame
        self._now = now

    def message(self, message: Json) -> Json:
        """A canonical message as the template gets it."""
        return engine_message(message, parts=self._template.content_as_parts)

    def render(self, messages: Sequence[Json], *, add_generation_prompt: bool | None = None) -> str:
        """The text of a prompt, from messages as the template gets them. Raises RenderError."""
        if not self._template.has_developer_role:
            messages = developers_as_system(messages)
        if add_generation_prompt is None:
            add_generation_prompt = self._frame.add_generation_prompt
        return self._template.render(
            messages,
            tools=self._frame.tools,
            add_generation_prompt=add_generation_prompt,
            kwargs=self._frame.kwargs,
            now=self._now,
        )

    def render_as_tokenized(
        self, messages: Sequence[Json], *, add_generation_prompt: bool | None = None
    ) -> str:
        """The same as the tokenizer reads it: all comparisons are made on this."""
        return self.tokenizer.roundtrip(
            self.render(messages, add_generation_prompt=add_generation_prompt)
        )


def stop_token_text(turn: RecordedTurn, tokenizer: Tokenizer) -> str | None:
    """The text of the token that ended the turn. None if it was cut short or ended by a stop
    string, or by a token of ordinary text."""
    if turn.is_open or turn.finish_reason == "abort":
        return None
    return tokenizer.added_token(turn.completion_ids[-1])


def was_sent(text: str, chain: Sequence[RecordedTurn], renderer: Renderer) -> bool:
    """Whether `text` is what the engine was sent for the last turn of `chain`.

    Inside earlier replies the sent prompt holds what the model wrote, `text` how the template
    writes it; so these are passed over, up to the end token that each was cut at, the template's
    where it has another there, or to what was put behind one that had none.
    """
    start = renderer.tokenizer.decode(chain[0].prompt_ids)
    if not text.startswith(start):
        return False
    at = len(start)
    for turn, following in pairwise(chain):
        ends = (_end_of(each, text, at) for each in _added(turn, following, renderer))
        after = next((end for end in ends if end is not None), None)
        if after is None:
            return False
        at = after
    return at == len(text)


class _Added(NamedTuple):
    """What was put behind a reply; `token` is the first added token in it, behind `lead`
    characters."""

    text: str
    token: str
    lead: int = 0


def _added(turn: RecordedTurn, following: RecordedTurn, renderer: Renderer) -> list[_Added]:
    """From the reply's end token on: as it was sent, and as the template may write it."""
    tokenizer = renderer.tokenizer
    added = following.prompt_ids[len(turn.prompt_ids) + len(turn.completion_ids) :]
    stop = stop_token_text(turn, tokenizer)
    if stop is None:
        closer = next((n for n, id_ in enumerate(added) if tokenizer.added_token(id_)), None)
        if closer is None:
            return []
        token = tokenizer.added_token(added[closer]) or ""
        return [_Added(tokenizer.decode(added), token, len(tokenizer.decode(added[:closer])))]
    sent = tokenizer.decode(turn.completion_ids[-1:] + added)
    others = renderer.end_tokens - {stop} if stop in renderer.end_tokens else ()
    behind = sent.removeprefix(stop)
    return [_Added(sent, stop), *(_Added(other + behind, other) for other in sorted(others))]


def _end_of(added: _Added, text: str, at: int) -> int | None:
    # A reply that held this text itself would not have been continued.
    start = text.find(added.token, at) - added.lead
    return start + len(added.text) if start >= at and text.startswith(added.text, start) else None
