"""A candidate on one engine of several, which gets a share of the rollouts and no others.

serve ─► rollouts of its share ─┬► promote: the other engines get it, one after the other
                                └► end: its engine serves again what the others do
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from tracegrad_trainer.inference.control_routes import ServedWeights
from tracegrad_trainer.inference.rolling_push import roll
from tracegrad_trainer.inference.weight_swap import Verify, WeightSwap


class CanaryEngine(NamedTuple):
    """The engine that candidates are pushed to, by its URL, and the share of rollouts that it
    gets."""

    url: str
    share: float


class CanaryPush:
    """`served` in its methods: what the other engines have. Each raises PushError (nothing has
    changed), EngineLostError, and returns seconds by stage."""

    def __init__(self, swap: WeightSwap, engine: CanaryEngine, urls: Sequence[str]) -> None:
        """`urls`: of all engines."""
        if len(urls) < 2 or engine.url not in urls:
            raise ValueError("canary: one of several engines, for the others serve the rest")
        self.engine = engine
        self.candidate: ServedWeights | None = None  # what its engine serves in place of `served`
        self._swap = swap
        self._others = [url for url in urls if url != engine.url]

    def serve(
        self, new: ServedWeights, served: ServedWeights, verify: Verify | None
    ) -> dict[str, float]:
        """To the canary's engine alone, in place of the candidate before it."""
        swap, url = self._swap, self.engine.url
        check = partial(verify, url) if verify else None
        swap.engines.ask_all()
        with swap.engines.only(url), swap.made_ready(new):
            # First: nobody beyond the share is to have a token of it.
            swap.proxy.set_canary(*self.engine)
            try:
                with swap.proxy.only(url):
                    seconds = swap.change(new, self.candidate or served, check)
            except BaseException:
                if self.candidate is None:
                    swap.proxy.end_canary()
                raise
        self.candidate = new
        return seconds

    def promote(self, served: ServedWeights) -> dict[str, float]:
        """To the other engines; it is no candidate any more."""
        assert self.candidate is not None
        swap, new = self._swap, self.candidate
        swap.engines.ask_all()
        with swap.engines.only(*self._others), swap.made_ready(new):
            seconds = roll(swap, self._others, new, served)
        self.forget()
        return seconds

    def end(self, served: ServedWeights) -> dict[str, float]:
        """The canary's engine serves again what the others do."""
        assert self.candidate is not None
        swap = self._swap
        swap.engines.ask_all()
        with swap.only(self.engine.url):
            seconds = swap.change(served, self.candidate)
        self.forget()
        return seconds

    def forget(self) -> None:
        """All engines serve the same."""
        if self.candidate is not None:
            self.candidate = None
            self._swap.proxy.end_canary()
