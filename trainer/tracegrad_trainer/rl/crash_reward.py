"""The reward of attempts that crashed and that nobody scored (`rewards.agent_error`)."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping

from tracegrad.events import Outcome, Reward
from tracegrad.store import Ledger, Store
from tracegrad.store.types import RULE_SOURCE
from tracegrad.text_format import format_count

logger = logging.getLogger(__name__)

_ASK_EVERY_S = 1.0
LABEL = "rewards.agent_error"


class CrashReward:
    """Gives `value` to rollouts with these `tags`, and to held-out ones, that ended with
    agent_error: an ordinary reward event, once. One that somebody gives later counts instead, and
    one that was taken back stays unknown."""

    def __init__(
        self,
        store: Store,
        value: float,
        tags: Mapping[str, str],
        held_out: Mapping[str, str] | None = None,
    ) -> None:
        self._store = store
        self._ledger = Ledger(store)
        self._value = value
        self._tags = tags
        self._held_out = held_out
        self._asked = -_ASK_EVERY_S

    def apply(self, after_s: float) -> None:
        """To those that ended so long ago: somebody may yet say what they were worth. Asks the
        store once a second at most. Raises StoreError."""
        if time.monotonic() - self._asked < _ASK_EVERY_S:
            return
        self._asked = time.monotonic()
        crashed = self._ledger.unrewarded(
            Outcome.AGENT_ERROR, tags=self._tags, after_s=after_s, held_out=self._held_out
        )
        if not crashed:
            return
        self._store.append([self._reward(rollout_id) for rollout_id in crashed])
        logger.info(
            "%s ended with agent_error and without a reward: %g (%s)",
            format_count(len(crashed), "rollout"),
            self._value,
            LABEL,
        )

    def _reward(self, rollout_id: str) -> Reward:
        # The same id from every trainer of the store: it is given once.
        name = hashlib.sha256(f"{LABEL}\n{rollout_id}".encode()).hexdigest()[:32]
        return Reward(
            reward_id=name,
            rollout_id=rollout_id,
            value=self._value,
            source=RULE_SOURCE,
            label=LABEL,
        )
