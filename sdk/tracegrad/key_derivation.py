"""The keys of one rollout, derived from the admin key: `tg-<rollout>.<43 characters>`.

One for `calls` is for the agent: it calls models. One for `events` is for whoever scores the agent:
it posts rewards and the rollout's end.

Whoever has the admin key makes it without asking anybody, and the proxy proves it by making it
again; nobody else can, and the admin key cannot be computed from it. It can be guessed from it: an
admin key must be random (`openssl rand -hex 32`), as any password that an agent might try.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Literal

from tracegrad.protocol import API_KEY_PREFIX, SECRET_KEY

KeyScope = Literal["calls", "events"]
CALLS: KeyScope = "calls"
EVENTS: KeyScope = "events"
SCOPES: tuple[KeyScope, ...] = (CALLS, EVENTS)

_PURPOSES: dict[KeyScope, bytes] = {
    CALLS: b"tracegrad rollout key 1\0",
    EVENTS: b"tracegrad rollout events key 1\0",
}


def derive_key(admin_key: str, rollout_id: str, scope: KeyScope = CALLS) -> str:
    """HMAC-SHA-256 of the rollout's id under the admin key, as a key that names the rollout."""
    message = _PURPOSES[scope] + rollout_id.encode()
    proof = hmac.new(admin_key.encode(), message, hashlib.sha256).digest()
    text = base64.urlsafe_b64encode(proof).rstrip(b"=").decode()
    return f"{API_KEY_PREFIX}{rollout_id}.{text}"


def sign_text(admin_key: str, purpose: str, text: str) -> str:
    """HMAC-SHA-256 of a text under the admin key, in hex: whoever has the key proves that the text
    was its own. `purpose` keeps what is signed for one use from being used for another."""
    message = f"tracegrad {purpose} 1\0{text}".encode()
    return hmac.new(admin_key.encode(), message, hashlib.sha256).hexdigest()


def is_secret_key(key: str) -> bool:
    """Whether it is the key of one rollout, made from a secret, and not one that only names it."""
    return SECRET_KEY.fullmatch(key) is not None


def verify_derived_key(key: str, admin_key: str) -> tuple[str, KeyScope] | None:
    """The rollout and scope that the key is `derive_key`'s for; None for any other key."""
    named = SECRET_KEY.fullmatch(key)
    if named is None:
        return None
    for scope in _PURPOSES:
        right = derive_key(admin_key, named[1], scope)
        if hmac.compare_digest(key.encode(), right.encode()):
            return named[1], scope
    return None
