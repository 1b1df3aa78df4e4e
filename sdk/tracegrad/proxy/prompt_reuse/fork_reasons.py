"""Why a prompt is rendered afresh instead of being continued token for token."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ForkReason(StrEnum):
    """Stable names, stored with the turn that forked; `meaning` is the explanation for people."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> ForkReason:
        reason = str.__new__(cls, name)
        reason._value_ = name
        reason.meaning = meaning
        return reason

    # Found while the recorded turn is looked for (`conversation_hash`).
    NEW_CONVERSATION = (
        "new_conversation",
        "The request holds no reply of the model: it begins a conversation (a retry, a sub-agent).",
    )
    EDITED_HISTORY = (
        "edited_history",
        "An earlier message was changed, dropped or inserted: no recorded turn is continued.",
    )
    COMPACTION = (
        "compaction",
        "The conversation is shorter than the one recorded before it: part of it was cut out or "
        "summed up.",
    )
    TOOLS_CHANGED = (
        "tools_changed",
        "The messages continue a turn, but with other tools or template arguments.",
    )
    EDITED_CALLS = (
        "edited_calls",
        "The client sent the model's tool calls back changed.",
    )
    CALLS_AS_TEXT = (
        "calls_as_text",
        "The client sent the model's tool calls back as text.",
    )
    EXTENDED_REPLY = (
        "extended_reply",
        "The client added text to the model's reply, behind the token that the model ended it "
        "with.",
    )
    RESPELLED_ARGUMENTS = (
        "respelled_arguments",
        "The client wrote the model's text anew: the arguments in it are the same, spelled "
        "otherwise.",
    )
    MOVED_MESSAGE = (
        "moved_message",
        "Earlier messages are there, but in another order: the client moved one.",
    )
    EDITED_CONTENT = (
        "edited_content",
        "The client sent the text of the model's reply back changed.",
    )
    EDITED_REASONING = (
        "edited_reasoning",
        "The client sent the model's reasoning back changed.",
    )

    # What is not in the store any more, or never was.
    NO_TEXT = (
        "no_text",
        "The texts of earlier turns are not stored: what this one continues is not found by them.",
    )
    REMOVED = (
        "removed",
        "The turn that it continues was removed from the store meanwhile.",
    )

    # What training has.
    ROLLOUT_TAKEN = (
        "rollout_taken",
        "Its conversation's rollout was closed after a time without a call, and training had taken "
        "it when this call came: the conversation goes on in this one, with the same tokens.",
    )

    # What no continuation can be made of.
    MEDIA = (
        "media",
        "A message holds images, audio or video: the engine renders these itself.",
    )
    OWN_RENDERING = (
        "own_rendering",
        "The request asks the engine for another rendering than the model's own.",
    )
    NOTHING_NEW = (
        "nothing_new",
        "No message follows the model's reply, or one that is the model's own.",
    )
    NO_TOKENS = (
        "no_tokens",
        "The recorded turn has no token ids to continue from.",
    )
    TOKENIZER = (
        "tokenizer",
        "The model's tokenizer or template cannot be reproduced exactly in the proxy.",
    )

    # What the template, rendered, does not bear out.
    NOT_AS_SENT = (
        "not_as_sent",
        "The engine was sent another prompt for the recorded turn than the template gives now.",
    )
    TEMPLATE_ERROR = (
        "template_error",
        "The template refuses these messages.",
    )
    GENERATION_PROMPT = (
        "generation_prompt",
        "The template does not keep what it put before the reply (an empty think block, say).",
    )
    HISTORY_REWRITTEN = (
        "history_rewritten",
        "The template renders earlier messages differently now that newer ones follow.",
    )
    REASONING_DROPPED = (
        "reasoning_dropped",
        "The template leaves out the reasoning of the reply.",
    )
    CONTENT_CHANGED = (
        "content_changed",
        "The template does not keep the text of the reply as it is.",
    )
    STOP_STRING = (
        "stop_string",
        "A stop string ended the reply: the sampled tokens hold text that the message lacks.",
    )
    STOP_NOT_RENDERED = (
        "stop_not_rendered",
        "The template does not put the token that ended the reply after it.",
    )
    CUT_SHORT = (
        "cut_short",
        "The reply has no end token, and the template renders it as something else than was said.",
    )
    TEMPLATE = (
        "template",
        "It cannot be proven where the reply ends in what the template renders.",
    )
    TOKENS = (
        "tokens",
        "The new text does not become the same tokens alone as in the whole prompt.",
    )


@dataclass(frozen=True, slots=True)
class PromptFork:
    """The prompt must be rendered afresh. `detail` says more in one line, for people."""

    reason: ForkReason
    detail: str = ""


class PromptForked(Exception):
    """Carries a fork out of the middle of a proof."""

    def __init__(self, reason: ForkReason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.fork = PromptFork(reason, detail)
