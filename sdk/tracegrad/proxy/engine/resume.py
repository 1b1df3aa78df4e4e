"""A stream whose engine died goes on with another engine, behind the tokens that the client has.

To that one they are a part of the prompt, so that what it samples next has the distribution that
the first engine's next token had. That does not hold of what looks back at the reply's own tokens,
or parses it from its beginning, as a tool call is parsed: such streams end with an error, as their
clients expect of any. vLLM's parsers see by the prompt's tokens whether a thought is open.
"""

from __future__ import annotations

from dataclasses import replace

from tracegrad.chat import sampling_params
from tracegrad.chat.call import CHAT_PATH, Call

# Neither of these looks at what was sampled before.
_WITHOUT_MEMORY = (None, "greedy", "sampling_truncated")
_LIMITS = ("max_tokens", "max_completion_tokens")
_TEXT_LIMIT = 16  # of text completions that name none
# These are about the prompt, of which the beginning of the reply is then a part.
_OF_THE_PROMPT = ("echo", "truncate_prompt_tokens")


def resumed(call: Call, said: int) -> Call | None:
    """The call for the rest of its answer, of which `said` tokens are there. None: it would not be
    the rest of the same answer, or there is none."""
    body = call.body
    settings = sampling_params.sampling_params_of(body)
    # A stop string may have begun, in words that are held back until that is known.
    if call.n != 1 or body.get("stop") or any(body.get(name) for name in _OF_THE_PROMPT):
        return None
    if call.untrainable == "constrained":  # by the engine
        return None
    if sampling_params.untrainable_reason(body, settings) not in _WITHOUT_MEMORY:
        return None
    if call.path != CHAT_PATH:
        if not _is_one_prompt(body["prompt"]):
            return None
        if body.get("max_tokens") is None:
            body = {**body, "max_tokens": _TEXT_LIMIT}
    left = {name: body[name] - said for name in _LIMITS if isinstance(body.get(name), int)}
    if min(left.values(), default=1) < 1:
        return None
    return replace(call, body={**body, **left})


def _is_one_prompt(prompt: object) -> bool:
    """A text, or a list of token ids."""
    return isinstance(prompt, str) or (isinstance(prompt, list) and isinstance(prompt[0], int))
