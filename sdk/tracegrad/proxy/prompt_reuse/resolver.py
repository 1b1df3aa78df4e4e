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

from tracegrad.chat.messages import frame_of, own_rendering
from tracegrad.events import Json, new_id, token_ids
from tracegrad.proxy.dialects.base import Call
from tracegrad.proxy.http.worker_threads import LARGE
from tracegrad.proxy.prompt_reuse.conversation_hash import (
    Conversation,
    miss_reason,
    recorded_conversation,
)
from tracegrad.proxy.prompt_reuse.fork_reasons import Fork, Reason
from tracegrad.proxy.prompt_reuse.renderer_loader import EngineText
from tracegrad.proxy.prompt_reuse.splice import Spliced, splice
from tracegrad.proxy.prompt_reuse.tree_cache import (
    Known,
    ReadsTurns,
    Trees,
    longest_first,
    said_in,
)
from tracegrad.turn_tree import extends, find_parent

log = logging.getLogger("tracegrad.proxy")

# How many turns, the latest first, the tokens of a call without a name are compared with.
RECENT_TURNS = 1000


class Place(NamedTuple):
    """Where in which turn tree a call belongs."""

    rollout_id: str
    parent_id: str | None
    fork_reason: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """`prompt_ids`: the tokens to give the engine in place of the messages; None where it is to
    render them. `fork` says why, unless the call begins its rollout."""

    rollout_id: str | None
    said: Conversation | None
    parent: Known | None = None
    prompt_ids: array[int] | None = None
    fork: Fork | None = None

    @property
    def routes_from(self) -> int:
        """The first of the prompt's tokens whose routed experts the turn that it continues cannot
        have: that turn's last, which it only sampled."""
        if self.prompt_ids is None or self.parent is None:
            return 0
        return self.parent.length - 1


class Continuation:
    """To be used from one event loop.

    `text` is None for an engine that takes no tokens: its prompts are found again all the same.
    """

    def __init__(
        self, store: ReadsTurns, *, limit_bytes: int, text: EngineText | None = None
    ) -> None:
        self._trees = Trees(store, limit_bytes=limit_bytes)
        self._text = text
        self._ignored = False

    async def plan(self, rollout_id: str | None, call: Call) -> Plan:
        """Raises what the store raises."""
        said = await _said(call)
        if said is None or not said.replies:
            # Nothing said by a model: nothing to continue, and no reason to wait for the store.
            return Plan(rollout_id, said)
        parent = self._trees.find(said, rollout_id)
        if parent is None and rollout_id is not None:
            turns = await self._trees.turns(rollout_id, anew=True)
            parent = self._trees.find(said, rollout_id)
            if parent is None:
                return Plan(rollout_id, said, fork=_missed(said, turns))
        if parent is None:
            return Plan(None, said)
        prompt = await self._continued(call, parent)
        if isinstance(prompt, Fork):
            return Plan(parent.rollout_id, said, parent, fork=prompt)
        return Plan(parent.rollout_id, said, parent, prompt.ids)

    async def place(self, plan: Plan, prompt: array[int]) -> Place:
        """`prompt`: the tokens that the engine says it used. Raises what the store raises."""
        if plan.prompt_ids is not None and prompt != plan.prompt_ids and prompt:
            self._was_ignored()
        if plan.rollout_id is None:
            return self._place_untitled(plan, prompt)
        if plan.parent is not None and _follows(prompt, plan.parent):
            return Place(plan.rollout_id, plan.parent.turn.turn_id, None)
        if not prompt and plan.parent is not None:
            # Refused, or broken off before its first word: there are no tokens that could fork.
            return Place(plan.rollout_id, None, None)
        if plan.said is not None and not plan.said.replies:
            # A prompt without a reply extends none.
            return Place(plan.rollout_id, None, _reason(plan, self._trees.here(plan.rollout_id)))
        turns = await self._trees.turns(plan.rollout_id)
        with_tokens = [turn for turn in turns if turn.prompt_token_ids]
        parent = find_parent(prompt, longest_first(with_tokens)) if prompt else None
        parent_id = parent.turn.turn_id if parent is not None else None
        forked = parent is None or plan.parent is not None
        return Place(plan.rollout_id, parent_id, _reason(plan, turns) if forked else None)

    async def follow(self, rollout_id: str, call: Call) -> tuple[Plan, Place]:
        """Where a call belongs that was made elsewhere and told without tokens: below the turn
        without tokens whose words it continues. Raises what the store raises."""
        said = said_in(call)
        if said is None or not said.replies:
            plan = Plan(rollout_id, said)
        else:
            turns = await self._trees.turns(rollout_id)
            parent = self._trees.find(said, rollout_id)
            fork = _missed(said, turns) if parent is None else None
            plan = Plan(rollout_id, said, parent, fork=fork)
        return plan, await self.place(plan, token_ids())

    def same_words(self, call: Call, reply: Json) -> list[Known]:
        """Turns of late, of any rollout, in which the same was said to the model and by it;
        whatever the tools were, which are told in too many ways."""
        said = said_in(call)
        if said is None or not call.messages:
            return []
        last = said.then(reply).marks[-1]
        return [
            turn
            for turn in self._trees.recent(RECENT_TURNS)
            if turn.said is not None and turn.said.marks[-1] == last
        ]

    def forget(self, rollout_id: str) -> None:
        """The store has not these turns any more."""
        self._trees.forget(rollout_id)

    def add(self, turn: Known) -> None:
        """A turn that the store has committed."""
        self._trees.add(turn)

    async def _continued(self, call: Call, parent: Known) -> Spliced | Fork:
        if self._text is None:
            return Fork(Reason.TOKENIZER, "the engine takes no tokens")
        if (name := own_rendering(call.body)) is not None:
            return Fork(Reason.OWN_RENDERING, name)
        path = self._trees.path(parent)
        chain = [each.turn for each in path]
        messages = recorded_conversation(call.messages, chain)
        if isinstance(messages, Fork):
            return messages
        text = await self._text.get()
        if isinstance(text, Fork):
            return text
        # The clock of the root's rendering, as far as its date goes.
        began = datetime.fromtimestamp(path[0].created_at)  # noqa: DTZ006 (the engine's local time)

        def proven() -> Spliced | Fork:
            assert self._text is not None
            if not self._text.tokenizes(text, chain[0].prompt_ids):
                return Fork(Reason.TOKENIZER, "other tokens than the engine's")
            return splice(text, chain, messages, frame_of(call.body), began)

        return await asyncio.to_thread(proven)

    def _place_untitled(self, plan: Plan, prompt: array[int]) -> Place:
        # Without a reply among its messages a prompt cannot contain one.
        if prompt and plan.said is not None and plan.said.replies:
            recent = [
                turn for turn in self._trees.recent(RECENT_TURNS) if turn.completion_token_ids
            ]
            if (parent := find_parent(prompt, longest_first(recent))) is not None:
                return Place(parent.rollout_id, parent.turn.turn_id, None)
        rollout_id = new_id()
        self._trees.plant(rollout_id, whole=True)
        return Place(rollout_id, None, None)

    def _was_ignored(self) -> None:
        """Says it once: the turns are true all the same, with the tokens that the engine told."""
        if not self._ignored:
            self._ignored = True
            log.error("the engine did not use the tokens that it was given for a prompt")


async def _said(call: Call) -> Conversation | None:
    if call.size <= LARGE:
        return said_in(call)

    def hashed() -> Conversation | None:
        said = said_in(call)
        if said is not None:
            _ = said.marks  # made now, and not by the event loop
        return said

    return await asyncio.to_thread(hashed)


def _follows(prompt: array[int], parent: Known) -> bool:
    # Where an engine tells no tokens, what was said is all there is to compare.
    return bool(prompt) == bool(parent.prompt_token_ids) and extends(prompt, parent)


def _missed(said: Conversation, turns: Sequence[Known]) -> Fork | None:
    """Why no turn of the rollout is found by what was said; None for its first turn."""
    reason = miss_reason(said, [turn.said for turn in turns if turn.said is not None])
    if reason is not Reason.TOOLS_CHANGED and not all(turn.has_text for turn in turns):
        reason = Reason.NO_TEXT
    return Fork(reason) if reason is not None else None


def _reason(plan: Plan, turns: Sequence[Known]) -> str | None:
    """Why a prompt that continues no turn does not; None for a rollout's first turn."""
    if plan.fork is not None:
        return plan.fork.reason.value
    if plan.said is None or all(turn.said is None and turn.has_text for turn in turns):
        return None
    return (Reason.TEMPLATE if plan.said.replies else Reason.NEW_CONVERSATION).value
