"""Which recorded turn a call continues, and with which exact tokens.

Before the engine is asked, `plan` finds the turn by what was said and proves the tokens of the
prompt; afterwards `place` holds the tokens that the engine says it used against the tree. Only
equal tokens make a child: what was said is how a parent is found, never why it is one.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from tracegrad.chat.call import Call
from tracegrad.chat.messages import custom_rendering_field
from tracegrad.events import Json, new_id, token_id_array
from tracegrad.proxy.http.request_body import LARGE_BODY_BYTES
from tracegrad.proxy.prompt_reuse.conversation_hash import (
    HashedConversation,
    fork_reason_of_miss,
    is_extended,
    reply_difference,
    with_recorded_replies,
)
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason, PromptFork
from tracegrad.proxy.prompt_reuse.renderer_loader import EngineRenderer
from tracegrad.proxy.prompt_reuse.splice import SplicedPrompt, splice_prompt
from tracegrad.proxy.prompt_reuse.tree_cache import (
    CachedTurn,
    TurnReader,
    TurnTreeCache,
    hash_call,
    longest_first,
)
from tracegrad.proxy.shared_log import SharedLog
from tracegrad.store.errors import StoreUnavailable
from tracegrad.turn_tree import extends, find_parent

log = logging.getLogger("tracegrad.proxy")

# How many turns, the latest first, the tokens of a call without a name are compared with.
RECENT_TURNS = 1000
# Conversations without a name that a proxy reads when it was started and is first asked to go on
# with one: nothing else leads to what was said before it began.
READ_AT_START = 512


class TreePosition(NamedTuple):
    """Where in which turn tree a call belongs."""

    rollout_id: str
    parent_id: str | None
    fork_reason: str | None


@dataclass(frozen=True, slots=True)
class ContinuationPlan:
    """`prompt_ids`: the tokens to give the engine in place of the messages; None where it is to
    render them. `fork` says why, unless the call begins its rollout."""

    rollout_id: str | None
    conversation: HashedConversation | None
    parent: CachedTurn | None = None
    prompt_ids: array[int] | None = None
    fork: PromptFork | None = None

    @property
    def routed_experts_from(self) -> int:
        """The first of the prompt's tokens whose routed experts the turn that it continues cannot
        have: that turn's last, which it only sampled."""
        if self.prompt_ids is None or self.parent is None:
            return 0
        return self.parent.length - 1

    @property
    def reused_tokens(self) -> int:
        """The tokens that the engine is given as they were recorded."""
        return 0 if self.prompt_ids is None or self.parent is None else self.parent.length


class PromptReuse:
    """To be used from one event loop.

    `text` is None for an engine that takes no tokens: its prompts are found again all the same.
    """

    def __init__(
        self,
        store: TurnReader,
        *,
        limit_bytes: int,
        text: EngineRenderer | None = None,
        others: SharedLog | None = None,
    ) -> None:
        self._trees = TurnTreeCache(store, limit_bytes=limit_bytes, others=others)
        self._text = text
        self._ignored = False
        self._reading: asyncio.Task[None] | None = None  # what was said before we began

    async def plan(self, rollout_id: str | None, call: Call) -> ContinuationPlan:
        """A call begins: which turn it continues, with which tokens. Raises StoreUnavailable."""
        try:
            return await self._plan(rollout_id, call)
        except StoreUnavailable:
            raise
        except Exception:
            # A conversation that cannot be followed is still served, and kept.
            log.exception("a call of rollout %s is not continued", rollout_id)
            return ContinuationPlan(rollout_id, None)

    async def _plan(self, rollout_id: str | None, call: Call) -> ContinuationPlan:
        said = await _said(call)
        if said is None or not said.replies:
            # Nothing said by a model: nothing to continue, and no reason to wait for the store.
            return ContinuationPlan(rollout_id, said)
        parent = self._trees.find(said, rollout_id)
        if parent is None and rollout_id is None:
            await self._read_earlier()
            parent = self._trees.find(said, None)
        if rollout_id is None and not _is_last_reply(parent, said):
            parent = _only_one(said, self._trees.answered_otherwise(said, None)) or parent
        if rollout_id is not None and not _is_last_reply(parent, said):
            parent = await self._find_stored(said, rollout_id, parent)
            if parent is None and not self._trees.answered_otherwise(said, rollout_id):
                turns = self._trees.in_memory(rollout_id)
                return ContinuationPlan(rollout_id, said, fork=_missed(said, turns))
        if rollout_id is not None and not _is_last_reply(parent, said):
            # It continues no recorded reply; if it has one with a change, that is why.
            edited = _edited(call, said, self._trees.answered_otherwise(said, rollout_id))
            if isinstance(edited, PromptFork):
                return ContinuationPlan(rollout_id, said, parent, fork=edited)
            parent = edited or parent
        if parent is None:
            return ContinuationPlan(rollout_id, said)
        prompt = await self._continued(call, parent)
        if isinstance(prompt, PromptFork):
            return ContinuationPlan(parent.rollout_id, said, parent, fork=prompt)
        return ContinuationPlan(parent.rollout_id, said, parent, prompt.ids)

    async def _find_stored(
        self, said: HashedConversation, rollout_id: str, found: CachedTurn | None
    ) -> CachedTurn | None:
        """In place of what was `found` here: the last reply may be another proxy's, of the same
        store. Raises what the store raises, where nothing was found."""
        try:
            if found is None or await self._trees.is_behind(rollout_id):
                await self._trees.turns(rollout_id, refresh=True)
                return self._trees.find(said, rollout_id)
        except Exception:
            if found is None:
                raise
            log.warning("rollout %s: whether the store has more is not known", rollout_id)
        return found

    async def _read_earlier(self) -> None:
        """Once; who comes meanwhile waits for the same reading."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._trees.read_inferred(READ_AT_START))
        try:
            await asyncio.shield(self._reading)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._reading = None  # the next one tries again
            log.warning("conversations of before this start are not known yet: %s", error)

    async def position(self, plan: ContinuationPlan, prompt: array[int]) -> TreePosition:
        """`prompt`: the tokens that the engine says it used. Raises what the store raises."""
        if plan.prompt_ids is not None and prompt != plan.prompt_ids and prompt:
            self._was_ignored()
        if plan.rollout_id is None:
            return self._place_untitled(plan, prompt)
        if plan.parent is not None and _follows(prompt, plan.parent):
            return TreePosition(plan.rollout_id, plan.parent.turn.turn_id, None)
        if not prompt and plan.parent is not None:
            # Refused, or broken off before its first word: there are no tokens that could fork.
            return TreePosition(plan.rollout_id, None, None)
        if plan.conversation is not None and not plan.conversation.replies:
            # A prompt without a reply extends none.
            return TreePosition(
                plan.rollout_id, None, _reason(plan, self._trees.in_memory(plan.rollout_id))
            )
        turns = await self._trees.turns(plan.rollout_id)
        with_tokens = [turn for turn in turns if turn.prompt_token_ids]
        parent = find_parent(prompt, longest_first(with_tokens)) if prompt else None
        parent_id = parent.turn.turn_id if parent is not None else None
        forked = parent is None or plan.parent is not None
        return TreePosition(plan.rollout_id, parent_id, _reason(plan, turns) if forked else None)

    async def position_reported(
        self, rollout_id: str, call: Call
    ) -> tuple[ContinuationPlan, TreePosition]:
        """Where a call belongs that was made elsewhere and reported without tokens: below the turn
        without tokens whose words it continues. Raises what the store raises."""
        said = hash_call(call)
        if said is None or not said.replies:
            plan = ContinuationPlan(rollout_id, said)
        else:
            turns = await self._trees.turns(rollout_id)
            parent = self._trees.find(said, rollout_id)
            fork = _missed(said, turns) if parent is None else None
            plan = ContinuationPlan(rollout_id, said, parent, fork=fork)
        return plan, await self.position(plan, token_id_array())

    def find_same_words(self, call: Call, reply: Json) -> list[CachedTurn]:
        """Turns of late, of any rollout, in which the same was said to the model and by it;
        whatever the tools were, which are reported in too many forms."""
        said = hash_call(call)
        if said is None or not call.messages:
            return []
        last = said.with_reply(reply).prefix_hashes[-1]
        return [
            turn
            for turn in self._trees.recent(RECENT_TURNS)
            if turn.conversation is not None and turn.conversation.prefix_hashes[-1] == last
        ]

    def forget(self, rollout_id: str) -> None:
        """The store has not these turns any more."""
        self._trees.forget(rollout_id)

    def add(self, turn: CachedTurn) -> None:
        """A turn that the store has committed."""
        self._trees.add(turn)

    async def _continued(self, call: Call, parent: CachedTurn) -> SplicedPrompt | PromptFork:
        if self._text is None:
            return PromptFork(ForkReason.TOKENIZER, "the engine takes no tokens")
        if (name := custom_rendering_field(call.body)) is not None:
            return PromptFork(ForkReason.OWN_RENDERING, name)
        path = self._trees.path(parent)
        chain = [each.turn for each in path]
        messages = with_recorded_replies(call.messages, chain)
        if isinstance(messages, PromptFork):
            return messages
        text = await self._text.get()
        if isinstance(text, PromptFork):
            return text
        # The clock of the root's rendering, as far as its date goes.
        began = datetime.fromtimestamp(path[0].created_at)  # noqa: DTZ006 (the engine's local time)
        rendered = _rendered_by_engine(path)
        unproven = None if self._trees.is_as_sent(path[rendered]) else rendered

        def proven() -> SplicedPrompt | PromptFork:
            assert self._text is not None
            if not self._text.reproduces(text, chain[0].prompt_ids):
                return PromptFork(ForkReason.TOKENIZER, "other tokens than the engine's")
            frame = self._text.frame(call.body)
            return splice_prompt(text, chain, messages, frame, began, unproven=unproven)

        spliced = await asyncio.to_thread(proven)
        if isinstance(spliced, SplicedPrompt):
            self._trees.set_as_sent(path[rendered])
        return spliced

    def _place_untitled(self, plan: ContinuationPlan, prompt: array[int]) -> TreePosition:
        # Without a reply among its messages a prompt cannot contain one.
        if prompt and plan.conversation is not None and plan.conversation.replies:
            recent = [
                turn for turn in self._trees.recent(RECENT_TURNS) if turn.completion_token_ids
            ]
            if (parent := find_parent(prompt, longest_first(recent))) is not None:
                return TreePosition(parent.rollout_id, parent.turn.turn_id, None)
        rollout_id = new_id()
        self._trees.create(rollout_id, whole=True)
        return TreePosition(rollout_id, None, None)

    def _was_ignored(self) -> None:
        """Says it once: the turns are still true, with the tokens that the engine reported."""
        if not self._ignored:
            self._ignored = True
            log.error("the engine did not use the tokens that it was given for a prompt")


async def _said(call: Call) -> HashedConversation | None:
    if call.size <= LARGE_BODY_BYTES:
        return hash_call(call)

    def hashed() -> HashedConversation | None:
        said = hash_call(call)
        if said is not None:
            _ = said.prefix_hashes, said.text_hashes  # made now, and not by the event loop
        return said

    return await asyncio.to_thread(hashed)


def _follows(prompt: array[int], parent: CachedTurn) -> bool:
    # Where an engine reports no tokens, only the messages can be compared.
    return bool(prompt) == bool(parent.prompt_token_ids) and extends(prompt, parent)


def _rendered_by_engine(path: Sequence[CachedTurn]) -> int:
    """Which turn of the path has the last prompt that the engine is sure to have rendered: the
    first of those with the tools and template arguments of its end. A prompt that is continued
    here has those of the turn before it."""
    frames = [turn.conversation and turn.conversation.frame for turn in path]
    others = (at for at, frame in enumerate(frames) if frame != frames[-1])
    return max(others, default=-1) + 1


def _is_last_reply(turn: CachedTurn | None, said: HashedConversation) -> bool:
    return turn is not None and turn.turn.reply_index == said.replies[-1]


def _only_one(said: HashedConversation, answered: Sequence[CachedTurn]) -> CachedTurn | None:
    """The turn whose reply `said` holds without the text beside its calls, whose ids are not
    theirs alone. None where turns of several rollouts may be meant."""
    held = [turn for turn in answered if said.holds(turn.turn)]
    return held[0] if len({turn.rollout_id for turn in held}) == 1 else None


def _edited(
    call: Call, said: HashedConversation, answered: Sequence[CachedTurn]
) -> CachedTurn | PromptFork | None:
    """Which of these turns was `answered` with the last reply of the call's messages, which its
    key does not show (the client added to it; or rewrote ids, and dropped the text beside calls),
    or what was changed in it. None where there are no such turns."""
    position = said.replies[-1]
    echoed = call.messages[position]
    reasons = [reply_difference(turn.turn.reply, echoed) for turn in answered]
    for turn, reason in zip(answered, reasons, strict=True):
        if reason is None or is_extended(turn.turn, echoed):
            return turn
    known = next((reason for reason in reasons if reason is not None), None)
    return PromptFork(known, f"message {position}") if known is not None else None


def _missed(said: HashedConversation, turns: Sequence[CachedTurn]) -> PromptFork | None:
    """Why no turn of the rollout is found by what was said; None for its first turn."""
    reason = fork_reason_of_miss(
        said,
        [turn.conversation for turn in turns if turn.conversation is not None],
        [turn.refused for turn in turns if turn.refused is not None],
    )
    if reason is not ForkReason.TOOLS_CHANGED and not all(turn.has_text for turn in turns):
        reason = ForkReason.NO_TEXT
    return PromptFork(reason) if reason is not None else None


def _reason(plan: ContinuationPlan, turns: Sequence[CachedTurn]) -> str | None:
    """Why a prompt that continues no turn does not; None for a rollout's first turn."""
    if plan.fork is not None:
        return plan.fork.reason.value
    if plan.conversation is None or all(
        turn.conversation is None and turn.has_text for turn in turns
    ):
        return None
    return (ForkReason.TEMPLATE if plan.conversation.replies else ForkReason.NEW_CONVERSATION).value
