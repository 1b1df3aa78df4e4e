"""Conversations of which a trainer learns every reply: only where that is true."""

from __future__ import annotations

from collections.abc import Iterator

from tracegrad.store.copy.export_records import RolloutCopy
from tracegrad.transfer.chat_conversations import imported_messages
from tracegrad.transfer.layouts import Reasons
from tracegrad_integrations.exports.conversations import Conversation, all_said, conversations


def whole_conversations(copy: RolloutCopy, left_out: Reasons) -> Iterator[Conversation]:
    """Those whose replies were all said by their turns, each in one conversation.

    Left out, counted by turns: conversations with replies that the agent brought along
    ("foreign_reply"), and those that share a reply with an earlier one ("shared_reply"), which
    would be learned twice. Imported conversations are all the teacher's.
    """
    told: set[str] = set()
    for conversation in conversations(all_said(copy, left_out)):
        ids = {said.turn.turn_id for said in conversation.turns}
        new = len(ids - told)
        if ids & told:
            left_out["turns: shared_reply"] += new
        elif not (conversation.only_ours or imported_messages(conversation.turns[0].turn)):
            left_out["turns: foreign_reply"] += new
        else:
            yield conversation
        told |= ids
