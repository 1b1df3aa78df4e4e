"""What an agent observed last, as a digest: the state of its environment as far as it can be seen.

Turns are compared by it whose agent gives no state key. It is taken when the call is recorded, so
it does not hang on whether texts are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import takewhile

from tracegrad.events import Json
from tracegrad.jsonutil import encode_json


def observation_of(messages: Sequence[Json]) -> str | None:
    """Digest, 32 hex digits, of the messages behind the last reply; of all, before the first.

    Roles and contents count. Instructions (system, developer) do not: they are the agent's. Nor
    do the ids of tool calls, which are new in every rollout. None: nothing was observed.
    """
    behind = takewhile(lambda message: message.get("role") != "assistant", reversed(messages))
    observed = [
        [message.get("role"), message.get("content")]
        for message in behind
        if message.get("role") not in ("system", "developer")
    ]
    if not observed:
        return None
    return hashlib.blake2b(encode_json(observed[::-1]), digest_size=16).hexdigest()
