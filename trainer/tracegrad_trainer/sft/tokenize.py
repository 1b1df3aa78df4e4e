"""A teacher's text as turns with tokens, rendered by the model's own template.

A trace that is text only (`no_tokens`) is rendered as the engine would have rendered it: for each
reply the prompt that leads to it, and the same conversation with the reply behind it. The reply's
tokens are what the second has more than the first, up to the token that ends a reply. A reply for
which that does not hold is no turn, and is counted with the reason:

- `no_text`: neither request nor reply was recorded
- `media`: pictures or sounds, whose tokens are not known
- `own_rendering`: the request replaced the template, or went on inside a reply
- `template`: the template refuses the conversation, or writes a reply in another way than at its
  prompt, or not at all
- `no_end_token`: no end token behind the reply; a model would not learn to stop
- `empty_reply`: nothing but the end token

Where templates write earlier replies otherwise than the last one (without its reasoning, say),
each reply is still behind the very prompt that would lead to it; the tree forks there.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tracegrad.chat.messages import custom_rendering_field, has_media, render_options
from tracegrad.chat.model import ChatFormat, NotReproducible, load_chat_format
from tracegrad.chat.renderer import Renderer
from tracegrad.chat.template import RenderError
from tracegrad.chat.tokenizer import UnencodableText
from tracegrad.events import Json, Turn, logprob_array, token_id_array
from tracegrad.proxy.dialects.history import recorded_call, recorded_reply
from tracegrad.transfer.chat_conversations import NO_TOKENS, imported_messages
from tracegrad.turn_tree import find_parent


class UnverifiableReply(Exception):
    """A reply that is no turn; the message is the reason."""


@dataclass(frozen=True, slots=True)
class ReplyTokenizer:
    """A model folder's template and tokenizer, and the tokens that end a reply."""

    text: ChatFormat
    end_tokens: frozenset[int]


def load_reply_tokenizer(folder: Path) -> ReplyTokenizer:
    """ValueError: the folder has no chat template, or one that is not the engine's."""
    try:
        text = load_chat_format(folder)
    except NotReproducible as error:
        raise ValueError(
            f"model: text traces need a chat template to become tokens, and {error};"
            " give a folder with one, or choose traces with tokens"
        ) from error
    return ReplyTokenizer(text, frozenset(_ends(folder, text)))


def _ends(folder: Path, text: ChatFormat) -> set[int]:
    """What `generate` and the engine stop at."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids = _json(folder / name).get("eos_token_id")
        found |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    token = _json(folder / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    encoded = text.tokenizer.encode(content) if content else None
    if encoded is not None and len(encoded) == 1:
        found.add(encoded[0])
    return found


def tokenize_replies(
    turns: Sequence[Turn], writer: ReplyTokenizer
) -> tuple[list[Turn], Counter[str]]:
    """Demonstrated turns for the text-only ones of a rollout, and why replies have none.

    An imported conversation is one turn, and every reply in it the teacher's; of a call that was
    captured only the answer is. Turns that continue others are below them in the tree.
    """
    by_id = {turn.turn_id: turn for turn in turns}
    made: list[Turn] = []
    left_out: Counter[str] = Counter()
    for turn in turns:
        if turn.untrainable != NO_TOKENS:
            continue
        try:
            conversation = _conversation(turn, by_id, writer)
        except UnverifiableReply as why:
            left_out[str(why)] += 1
            continue
        for place in conversation.replies:
            try:
                prompt, reply = conversation.tokens(place)
            except UnverifiableReply as why:
                left_out[str(why)] += 1
                continue
            parent = find_parent(prompt, made)
            made.append(_turn(turn, place, parent, prompt, reply))
    return made, left_out


def source_turn_id(turn_id: str) -> str:
    """Of a turn that `tokenize_replies` made: the one whose text it is."""
    return turn_id.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class _Conversation:
    messages: list[Json]  # as the template gets them
    replies: Sequence[int]  # places of what is to be learnt
    renderer: Renderer
    ends: Collection[int]

    def tokens(self, place: int) -> tuple[array[int], array[int]]:
        """Prompt and completion of the reply at `place`. Raises UnverifiableReply."""
        prompt = self._render(place, prompted=True)
        whole = self._render(place + 1, prompted=False)
        if whole[: len(prompt)] != prompt:
            raise UnverifiableReply("template")
        said = whole[len(prompt) :]
        end = next((i for i, token in enumerate(said) if token in self.ends), None)
        if end is None:
            raise UnverifiableReply("no_end_token")
        if end == 0:
            raise UnverifiableReply("empty_reply")
        reply, behind = said[: end + 1], said[end + 1 :]
        decode = self.renderer.tokenizer.decode
        if decode(behind).strip() or not self._holds(decode(reply), self.messages[place]):
            raise UnverifiableReply("template")
        return prompt, reply

    def _render(self, count: int, *, prompted: bool) -> array[int]:
        try:
            text = self.renderer.render(self.messages[:count], add_generation_prompt=prompted)
            return self.renderer.tokenizer.encode(text)
        except (RenderError, UnencodableText) as error:
            raise UnverifiableReply("template") from error

    def _holds(self, reply: str, message: Json) -> bool:
        """Whether the message's whole text is in the reply, as this tokenizer reads it."""
        read = self.renderer.tokenizer.roundtrip
        names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        return all(read(part.strip()) in reply for part in (*_texts(message), *names))


def _conversation(turn: Turn, by_id: dict[str, Turn], writer: ReplyTokenizer) -> _Conversation:
    call, reply = recorded_call(turn, by_id.get), recorded_reply(turn)
    if call is None or not call.messages or reply is None:
        raise UnverifiableReply("no_text")
    if custom_rendering_field(call.body):
        raise UnverifiableReply("own_rendering")
    said = [*call.messages, {**reply, "role": "assistant"}]
    if has_media(said):
        raise UnverifiableReply("media")
    now = datetime.fromtimestamp(turn.created_at)  # noqa: DTZ006 - templates show local dates
    renderer = Renderer(writer.text, render_options(call.body), now)
    last = len(said) - 1
    replies = [i for i, message in enumerate(said) if message.get("role") == "assistant"]
    return _Conversation(
        messages=[renderer.message(message) for message in said],
        replies=replies if imported_messages(turn) else [last],
        renderer=renderer,
        ends=writer.end_tokens,
    )


def _texts(message: Json) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if isinstance(part.get("text"), str)]


def _turn(
    turn: Turn, place: int, parent: Turn | None, prompt: array[int], reply: array[int]
) -> Turn:
    return Turn(
        turn_id=f"{turn.turn_id}/{place}",  # as `source_turn_id` takes it apart
        rollout_id=turn.rollout_id,
        parent_id=parent.turn_id if parent else None,
        dialect=turn.dialect,
        model=turn.model,
        prompt_token_ids=prompt,
        completion_token_ids=token_id_array(reply),
        completion_logprobs=logprob_array([0.0] * len(reply)),
        policy_versions=((-1, len(reply)),),
        sampling={"source": "demonstration"},
        finish_reason=turn.finish_reason,
        agent_name=turn.agent_name,
        asked_model=turn.asked_model,
        created_at=turn.created_at,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found
