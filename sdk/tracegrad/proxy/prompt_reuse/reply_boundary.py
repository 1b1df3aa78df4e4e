"""Where in a rendered prompt the reply ends: a proof, or a fork."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

from tracegrad.chat.messages import content_text
from tracegrad.chat.renderer import Renderer
from tracegrad.chat.template import RenderError
from tracegrad.events import Json
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason, PromptForked
from tracegrad.proxy.prompt_reuse.probes import (
    PlaceholderText,
    probe_new_messages,
    probe_reply,
    unused_salt,
)
from tracegrad.turn_tree import common_prefix


@dataclass(frozen=True, slots=True)
class PromptPair:
    """A conversation as the template gets it, and the texts of its prompts: `before` of `earlier`
    alone, as it was sent; `whole` of all of it, which begins with `before`."""

    renderer: Renderer
    earlier: list[Json]
    reply: Json
    new: list[Json]
    before: str
    whole: str

    def ends_with(self, tail: str) -> bool:
        """Whether `tail` ends `whole`, behind `before`."""
        return self.whole.endswith(tail, len(self.before))


@dataclass(frozen=True, slots=True)
class ReplyBoundary:
    """`tail` is the end of `whole` from the reply's end on; it begins with an added token, the
    one that ended the reply if one did. `lossy`: the template shows less than the reply has.

    `lead`: ordinary text between what was sampled and `tail`, where no token ended the reply: what
    the client added to it, and white space of the template's. `closed_by`: the token that `tail`
    begins with, where the template closes the reply with another than was sampled.
    """

    tail: str
    lossy: bool
    lead: str = ""
    closed_by: str | None = None


def boundary_after_stop(pair: PromptPair, stop: str, sampled: Sequence[int]) -> ReplyBoundary:
    """The reply was ended by the token with the text `stop`. Raises PromptForked."""
    before, whole = pair.before, pair.whole
    views = _ProbedRenderings(pair)
    if not views.seen:
        return _cut_by_text(views, stop, sampled)
    at = views.shown.find(stop, views.seen[-1])
    if at < 0 and stop in views.shown[views.seen[0] : views.seen[-1]]:
        raise PromptForked(ForkReason.TEMPLATE, "the reply is shown again behind its end")
    closed_by = views.other_end(stop) if at < 0 else None
    if closed_by is not None:
        stop, at = closed_by, views.shown.find(closed_by, views.seen[-1])
    tail = views.shown[at:]
    if not pair.ends_with(tail):
        raise PromptForked(ForkReason.TEMPLATE, "what follows the reply depends on what it says")
    said = whole[len(before) : len(whole) - len(tail)]
    if (said + stop).find(stop) != len(said):
        raise PromptForked(ForkReason.TEMPLATE, f"the reply holds the text {stop} itself")
    views.prove(at + len(stop), said + stop)
    if pair.renderer.tokenizer.decode(sampled[:-1]).strip() != said.strip():
        views.prove_reply(at)
    lossy = views.lost(at, said) or closed_by is not None
    return ReplyBoundary(tail, lossy, closed_by=closed_by)


def boundary_of_open_reply(
    pair: PromptPair, sampled: Sequence[int], *, extended: bool
) -> ReplyBoundary | None:
    """No token ended the reply, so the template's own end of a reply is new, and so is what the
    client put behind its text (`extended`). None: what the template shows is not what was sampled.
    Raises PromptForked."""
    tokenizer = pair.renderer.tokenizer
    views = _ProbedRenderings(pair)
    if not views.seen:
        if pair.reply.get("reasoning"):
            raise PromptForked(ForkReason.REASONING_DROPPED)
        return None
    end = views.seen[-1]
    closing = views.shown[end:]
    closer = tokenizer.first_added_token(closing)
    # Of a reply that is not finished, what ends a call, say, is not the end of the reply.
    if closer is None or closing[: closer[0]].strip() or not pair.ends_with(closing):
        return None
    space, first = closing[: closer[0]], closer[1]
    said = pair.whole[len(pair.before) : len(pair.whole) - len(closing)]
    added = _added_text(pair, said, sampled, extended=extended)
    if added is None or first in tokenizer.decode(sampled) or first in said:
        return None
    views.prove(end + len(space + first), said + space + first)
    if _bare(tokenizer.decode(sampled)) != _bare(said):
        views.prove_reply(end + len(space))
    return ReplyBoundary(closing[len(space) :], views.lost(end, said), added + space)


def _added_text(
    pair: PromptPair, said: str, sampled: Sequence[int], *, extended: bool
) -> str | None:
    """What `said`, which the template shows of the reply, has behind the end of what was
    `sampled`. White space at its end may be missing, and half a character. None: it is another
    text."""
    tokenizer = pair.renderer.tokenizer
    wrote = _bare(tokenizer.decode(sampled, skip_special=True))
    if extended:
        # All that the model wrote comes first, and no special token in what follows.
        start = said.find(wrote) if wrote else -1
        added = said[start + len(wrote) :]
        # White space that it wrote itself is not put there twice.
        space = tokenizer.decode(sampled, skip_special=True).lstrip()[len(wrote) :]
        added = added[common_prefix(added, space) :]
        whole = start >= 0 and not said[:start].strip()
        return added if whole and tokenizer.first_added_token(added) is None else None
    if pair.reply.get("tool_calls"):
        return "" if wrote == _bare(said) else None
    if wrote == _bare(said):
        return ""
    # The template may have put a stub before its text that the model left out, or other white space
    # around its reasoning.
    text = _bare(content_text(pair.reply.get("content"), joint=""))
    alike = text and _bare(said).endswith(text) and wrote.endswith(text)
    return "" if alike and _bare(pair.reply.get("reasoning") or "") in wrote else None


def _bare(text: str) -> str:
    """Without white space around it, and half a character at its end."""
    return text.strip().rstrip("\ufffd" + string.whitespace)


def _cut_by_text(views: _ProbedRenderings, stop: str, sampled: Sequence[int]) -> ReplyBoundary:
    """For templates that show nothing of such a reply (those that know no tool calls): it is
    rendered as a text, the very one that was sampled, whose end is then known."""
    pair = views.pair
    if pair.reply.get("reasoning"):
        raise PromptForked(ForkReason.REASONING_DROPPED)
    said = pair.renderer.tokenizer.decode(sampled[:-1])
    message = pair.renderer.message({"role": "assistant", "content": said})
    as_text = views.render(message, pair.new)
    tail = as_text[len(pair.before) + len(said) :]
    if not (
        as_text.startswith(said, len(pair.before))
        and tail.startswith(stop)
        and pair.ends_with(tail)
    ):
        raise PromptForked(ForkReason.TEMPLATE, "the template shows nothing of the reply")
    return ReplyBoundary(tail, lossy=True)


class _ProbedRenderings:
    """The prompt with marks in place of what was said."""

    def __init__(self, pair: PromptPair) -> None:
        self.pair = pair
        salt = unused_salt([pair.whole])
        # Of different lengths: a template that counts characters shows itself.
        self._x, self._y = PlaceholderText(f"{salt}x", 16), PlaceholderText(f"{salt}y", 40)
        self._others = probe_new_messages(pair.new, PlaceholderText(f"{salt}u", 24))
        self._probe = probe_reply(pair.reply, self._x)
        self.shown = self.render(self._probe.message, pair.new)
        self.seen = self._edges()

    def render(self, reply: Json, new: Sequence[Json]) -> str:
        try:
            text = self.pair.renderer.render_as_tokenized([*self.pair.earlier, reply, *new])
        except RenderError as error:
            raise PromptForked(ForkReason.TEMPLATE, f"refuses a probe: {error}") from error
        if not text.startswith(self.pair.before):
            raise PromptForked(
                ForkReason.TEMPLATE, "what precedes the reply depends on what it says"
            )
        return text

    def _edges(self) -> list[int]:
        """Where in `shown` the reply's marks begin and end, in order; empty if none is shown."""
        edges: list[int] = []
        for mark in self._probe.placeholders:
            if (first := self.shown.find(mark, len(self.pair.before))) >= 0:
                edges += (first, self.shown.rfind(mark) + len(mark))
        return sorted(edges)

    def prove(self, end: int, said: str) -> None:
        """That `shown[:end]` has nothing of the new messages in it, and neither has `said`, the
        same part of `whole`: both are still there when other messages follow."""
        other = probe_reply(self.pair.reply, self._y)
        head = self.shown[:end]
        for mark, mark_too in zip(self._probe.placeholders, other.placeholders, strict=True):
            head = head.replace(mark, mark_too)
        if not self.render(other.message, self._others).startswith(head):
            raise PromptForked(
                ForkReason.TEMPLATE, "where the reply ends depends on what follows it"
            )
        if not self.render(self.pair.reply, self._others).startswith(said, len(self.pair.before)):
            raise PromptForked(
                ForkReason.TEMPLATE, "how the reply is shown depends on what follows it"
            )

    def prove_reply(self, at: int) -> None:
        """That `shown` from the first mark to the end token, where this is not what was sampled,
        is all the reply: it is there also when nothing follows. (It might go on into a message
        that shows nothing new, after a reply without an end.)"""
        if not self._stands_alone(at):
            raise PromptForked(ForkReason.TEMPLATE, "what ends the reply is not the reply's")

    def _stands_alone(self, at: int) -> bool:
        try:
            alone = self.pair.renderer.render_as_tokenized(
                [*self.pair.earlier, self._probe.message], add_generation_prompt=False
            )
        except RenderError as error:
            raise PromptForked(ForkReason.TEMPLATE, f"refuses a probe: {error}") from error
        return self.shown[self.seen[0] : at] in alone

    def other_end(self, stop: str) -> str:
        """The end token of the model's that the template puts behind the reply in place of `stop`.
        It is the reply's, and does not open the next message: it stands there also when nothing
        follows, and a message that does has an opening of its own. Raises PromptForked."""
        ends = self.pair.renderer.end_tokens
        last = self.seen[-1]
        found = [(at, end) for end in ends if (at := self.shown.find(end, last)) >= 0]
        if stop in ends and found:
            at, end = min(found, key=lambda each: (each[0], -len(each[1])))
            behind = self.shown[at + len(end) :].lstrip()
            opened = self.pair.renderer.tokenizer.added_token_at_start(behind) is not None
            if opened and self._stands_alone(at + len(end)):
                return end
        raise PromptForked(ForkReason.STOP_NOT_RENDERED, f"no {stop} after the reply")

    def lost(self, end: int, said: str) -> bool:
        """Whether `said` lacks something of the reply. Raises PromptForked where what is shown is
        not what was said, or reasoning is not shown."""
        region = self.shown[len(self.pair.before) : end]
        probe, reply = self._probe, self.pair.reply
        lost = any(mark not in region for mark in probe.arguments)
        if probe.reasoning is not None and (
            probe.reasoning not in region or not self._holds(said, reply["reasoning"])
        ):
            raise PromptForked(ForkReason.REASONING_DROPPED)
        if probe.content is not None and not probe.stand_in:
            if probe.content not in region:
                lost = True
            elif not self._holds(said, content_text(reply["content"], joint="")):
                raise PromptForked(ForkReason.CONTENT_CHANGED)
        names = [call["function"].get("name", "") for call in reply.get("tool_calls") or ()]
        return lost or any(name not in said for name in names)

    def _holds(self, said: str, text: str) -> bool:
        text = text.strip()
        return text in said or self.pair.renderer.tokenizer.roundtrip(text).strip() in said
