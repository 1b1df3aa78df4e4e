"""The exact tokens of a prompt that continues a recorded turn, or the reason why there are none.

Write `before` for the text of the recorded turn's prompt as the template renders it, and `whole`
for that of the new one. A splice is right when

    whole = before + reply + stop + new

where `stop` is the text of the token that ended the reply (the template may write another of the
model's end tokens there, Llama's `<|eot_id|>` for a sampled `<|eom_id|>`); where none did (a limit
on its length, a stop string) it is the template's own, and text that the client put behind the
reply may come before it: both are new then. The tokens are those of the
recorded prompt, those that were sampled, and those of `new`; the prompt differs from one rendered
afresh only inside replies, where it keeps what the model wrote itself. The equation is checked
on the real text. What it does not tell is where in `whole` the reply ends: that is proven by
renderings in which marks stand for the reply and for the new messages (`cut`).

Everything is recorded messages, tokens and one clock: the result depends on nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from tracegrad.chat.call import RecordedTurn
from tracegrad.chat.messages import RenderOptions, has_media
from tracegrad.chat.model import ChatFormat
from tracegrad.chat.renderer import Renderer, stop_token_text, was_sent
from tracegrad.chat.template import RenderError
from tracegrad.chat.tokenizer import Tokenizer, UnencodableText
from tracegrad.events import Json
from tracegrad.proxy.prompt_reuse.conversation_hash import is_extended
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason, PromptFork, PromptForked
from tracegrad.proxy.prompt_reuse.reply_boundary import (
    PromptPair,
    ReplyBoundary,
    boundary_after_stop,
    boundary_of_open_reply,
)
from tracegrad.turn_tree import common_prefix


@dataclass(frozen=True, slots=True)
class SplicedPrompt:
    """`ids` is the whole prompt; its last `new` tokens are the rendering of what is new. `lossy`
    if a prompt rendered afresh would lose something of the reply that this one keeps."""

    ids: array[int]
    new: int
    lossy: bool = False


def splice_prompt(
    text: ChatFormat,
    chain: Sequence[RecordedTurn],
    messages: Sequence[Json],
    frame: RenderOptions,
    now: datetime,
    *,
    unproven: int | None = 0,
) -> SplicedPrompt | PromptFork:
    """The prompt for `messages`, which continue the last turn of `chain`.

    `chain` is the path to that turn from its root: each turn's prompt begins with the prompt and
    completion of the one before. `messages` hold the recorded replies in place of what the client
    sent (`with_recorded_replies`). `now` is the clock of the root's rendering, the same
    for all of a path. `unproven` is the turn of `chain` whose prompt the engine itself rendered
    from this frame: that it is what the template gives, to its last word, is not known yet. None:
    it is known. It costs 5 renderings: one more where the template writes the reply otherwise than
    the model did, and one more where `unproven` is not the last turn.
    """
    parent = chain[-1]
    try:
        _accept(parent, messages)
        return _spliced(Renderer(text, frame, now), chain, messages, unproven)
    except PromptForked as forked:
        return forked.fork
    except RenderError as error:
        return PromptFork(ForkReason.TEMPLATE_ERROR, str(error))
    except UnencodableText as error:
        return PromptFork(ForkReason.TOKENS, str(error))


def _accept(parent: RecordedTurn, messages: Sequence[Json]) -> None:
    if not parent.prompt_ids or not parent.completion_ids:
        raise PromptForked(ForkReason.NO_TOKENS)
    if has_media(messages):
        raise PromptForked(ForkReason.MEDIA)
    reply = messages[parent.reply_index]
    if reply != parent.reply and not is_extended(parent, reply):
        # Its tokens would say something else than the client did.
        raise PromptForked(ForkReason.EDITED_CONTENT)
    new = messages[parent.reply_index + 1 :]
    if not new or any(message["role"] == "assistant" for message in new):
        raise PromptForked(ForkReason.NOTHING_NEW)


def _spliced(
    renderer: Renderer,
    chain: Sequence[RecordedTurn],
    messages: Sequence[Json],
    unproven: int | None,
) -> SplicedPrompt:
    parent, tokenizer = chain[-1], renderer.tokenizer
    shown = [renderer.message(message) for message in messages]
    raw = renderer.render(shown)
    pair = PromptPair(
        renderer,
        earlier=shown[: parent.reply_index],
        reply=shown[parent.reply_index],
        new=shown[parent.reply_index + 1 :],
        before=_before(renderer, chain, shown, unproven),
        whole=tokenizer.roundtrip(raw),
    )
    if not pair.whole.startswith(pair.before):
        raise _rewritten(pair)
    stop = stop_token_text(parent, tokenizer)
    sampled = parent.completion_ids
    if stop is not None:
        cut = boundary_after_stop(pair, stop, sampled)
    else:
        extended = messages[parent.reply_index] != parent.reply
        cut = _open_boundary(parent, pair, extended=extended)
    new = tokenizer.encode_tail(cut.tail, raw)
    if stop is not None and new:
        # The end token is the model's: it is among the sampled ones already.
        closer = tokenizer.added_token(new[0])
        new = new[1:] if closer == (cut.closed_by or stop) else None
    if new is not None and cut.lead:
        new = _after(sampled, cut.lead, tokenizer) + new
    if new is None:
        raise PromptForked(ForkReason.TOKENS)
    return SplicedPrompt(parent.prompt_ids + sampled + new, len(new), cut.lossy)


def _open_boundary(parent: RecordedTurn, pair: PromptPair, *, extended: bool) -> ReplyBoundary:
    cut = boundary_of_open_reply(pair, parent.completion_ids, extended=extended)
    if cut is not None:
        return cut
    by_text = isinstance(parent.stop_reason, str)
    raise PromptForked(ForkReason.STOP_STRING if by_text else ForkReason.CUT_SHORT)


def _after(sampled: array[int], text: str, tokenizer: Tokenizer) -> array[int]:
    """The ids of `text` behind what was sampled. It is tokenised by itself, so it must be the same
    text there: some tokenizers put a space before a first word, and characters can fall apart."""
    ids = tokenizer.encode(text)
    if tokenizer.decode(sampled + ids) != tokenizer.decode(sampled) + text:
        raise PromptForked(ForkReason.TOKENS)
    return ids


def _before(
    renderer: Renderer, chain: Sequence[RecordedTurn], shown: Sequence[Json], unproven: int | None
) -> str:
    """The text of the last turn's prompt as the template writes it. It must be what was sent, and
    so must that of the `unproven` turn: what stands there before the reply (an empty think block)
    may be missing in later prompts, so these do not show that the engine's template puts it there
    too."""
    before = _as_sent(renderer, chain, shown)
    if unproven is not None and unproven + 1 < len(chain):
        _as_sent(renderer, chain[: unproven + 1], shown)
    return before


def _as_sent(renderer: Renderer, chain: Sequence[RecordedTurn], shown: Sequence[Json]) -> str:
    text = renderer.render_as_tokenized(shown[: chain[-1].reply_index])
    if not was_sent(text, chain, renderer):
        raise PromptForked(ForkReason.NOT_AS_SENT)
    return text


def _rewritten(pair: PromptPair) -> PromptForked:
    """Why `whole` does not begin with `before`; renders again, there is no haste any more."""
    try:
        bare = pair.renderer.render_as_tokenized(pair.earlier, add_generation_prompt=False)
    except RenderError:
        bare = ""
    if common_prefix(pair.whole, pair.before) >= common_prefix(bare, pair.before):
        return PromptForked(ForkReason.GENERATION_PROMPT)
    return PromptForked(ForkReason.HISTORY_REWRITTEN, _what_was_dropped(pair))


def _what_was_dropped(pair: PromptPair) -> str:
    for message in pair.earlier:
        reasoning = (message.get("reasoning") or "").strip()
        if reasoning and reasoning in pair.before and reasoning not in pair.whole:
            return "the reasoning of an earlier reply is left out"
    return ""
