"""Conversations of which a trainer learns every reply: only where that is true."""

from __future__ import annotations

from collections.abc import Iterator

from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.transfer.chat_conversations import imported_messages
from tracegrad.transfer.layouts import ReasonCounter
from tracegrad_integrations.exports.conversations import ChatConversation, chat_turns, conversations


def whole_conversations(copy: RolloutRecord, left_out: ReasonCounter) -> Iterator[ChatConversation]:
    """Those whose replies were all said by their turns, each in one conversation.

    Left out, counted by turns: conversations with replies that the agent brought along
    ("foreign_reply"), and those that share a reply with an earlier one ("shared_reply"), which
    would be learned twice. Imported conversations are all the teacher's.
    """
    told: set[str] = set()
    for conversation in conversations(chat_turns(copy, left_out)):
        ids = {said.turn.turn_id for said in conversation.turns}
        new = len(ids - told)
        if ids & told:
            left_out["turns: shared_reply"] += new
        elif not (
            conversation.all_replies_sampled or imported_messages(conversation.turns[0].turn)
        ):
            left_out["turns: foreign_reply"] += new
        else:
            yield conversation
        told |= ids
