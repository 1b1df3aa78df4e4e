"""Which rollouts a candidate's weights are tried on."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple


class Canary(NamedTuple):
    """The server of a candidate, and the share of rollouts that go there."""

    upstream: str
    share: float

    def has(self, rollout: str | None) -> bool:
        """By the rollout's name alone. A call without a name goes to what is promoted."""
        if rollout is None:
            return False
        drawn = int.from_bytes(sha256(f"canary\n{rollout}".encode()).digest()[:8])
        return drawn < self.share * 2.0**64
