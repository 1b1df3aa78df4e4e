"""Which experts the engine's routers chose, as vLLM reports it: base64 of a `.npy` file.

It reports a prompt too, from `routed_experts_prompt_start` on, and only in answers of one piece.
"""

from __future__ import annotations

import logging

from msgspec import DecodeError
from msgspec.json import Decoder

from tracegrad.proxy.engine.completion import SampledCompletion
from tracegrad.store.encoding.routed_experts import check_routing

log = logging.getLogger("tracegrad.proxy")

ROUTED_EXPERTS = "routed_experts"
ROUTED_EXPERTS_START = "routed_experts_prompt_start"

# Megabytes a call: no other decoder at hand is as fast.
_base64 = Decoder(bytes | None)
_said: set[str] = set()


def set_routed_experts(reply: SampledCompletion, encoded: bytes) -> None:
    """`encoded`: JSON. Routes of other tokens than the reply's are dropped, and its tokens stay."""
    if reply.discard_reason is not None or not reply.token_ids:
        return
    try:
        file = _base64.decode(encoded)
        if file is not None:
            check_routing(file, len(reply.prompt_token_ids) + len(reply.token_ids))
    except (DecodeError, ValueError) as error:
        # Where an engine's are of no use once, none of them may be.
        _once("the engine's routed_experts cannot be read, and are not recorded: %s", error)
        return
    reply.routed_experts = file


def warn_streams_lack_experts() -> None:
    """To be called where a client streams and routes are wanted."""
    _once("a client streams, and vLLM tells no routed_experts in streams: such turns have none")


def _once(message: str, *about: object) -> None:
    if message not in _said:
        _said.add(message)
        log.warning(message, *about)
