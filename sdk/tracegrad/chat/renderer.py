"""A model's prompts, and what the engine was sent of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

from tracegrad.chat.call import RecordedTurn
from tracegrad.chat.messages import RenderOptions, developers_as_system, engine_message
from tracegrad.chat.model import ChatFormat
from tracegrad.chat.tokenizer import Tokenizer
from tracegrad.events import Json


class Renderer:
    """A model's prompts under one frame and clock."""

    def __init__(self, text: ChatFormat, frame: RenderOptions, now: datetime) -> None:
        self.tokenizer = text.tokenizer
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


def was_sent(text: str, chain: Sequence[RecordedTurn], tokenizer: Tokenizer) -> bool:
    """Whether `text` is what the engine was sent for the last turn of `chain`.

    Inside earlier replies the sent prompt holds what the model wrote, `text` how the template
    writes it; so these are passed over, up to the end token that each was cut at, or to what was
    put behind one that had none.
    """
    start = tokenizer.decode(chain[0].prompt_ids)
    if not text.startswith(start):
        return False
    at = len(start)
    for turn, following in pairwise(chain):
        added = following.prompt_ids[len(turn.prompt_ids) + len(turn.completion_ids) :]
        stop, lead = stop_token_text(turn, tokenizer), ""
        if stop is not None:
            added = array("i", turn.completion_ids[-1:]) + added
        else:
            closer = next((n for n, id_ in enumerate(added) if tokenizer.added_token(id_)), None)
            if closer is None:
                return False
            stop, lead = (
                tokenizer.added_token(added[closer]) or "",
                tokenizer.decode(added[:closer]),
            )
        # A reply that held this text itself would not have been continued.
        part, end = tokenizer.decode(added), text.find(stop, at)
        if end - len(lead) < at or not text.startswith(part, end - len(lead)):
            return False
        at = end - len(lead) + len(part)
    return at == len(text)
