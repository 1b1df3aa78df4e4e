"""A candidate beside what is promoted, which a share of the rollouts gets and no others.

It has one engine of several for itself, or, as a LoRA adapter, a name of its own on the one engine.

    serve ─► rollouts of its share ─┬► promote: all engines get it, one after the other
                                    └► end: its place serves again what the others do
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


class CanaryAdapter(NamedTuple):
    """The name that candidates have in calls to the one engine, and the share of rollouts that are
    given it."""

    name: str
    share: float


class CanaryPush:
    """`served` in its methods: what is promoted. Each raises PushError (nothing has changed),
    EngineLostError, and returns seconds by stage.

    `place`: of the candidate, an engine's URL or a name; what `verify` is called with.
    """

    def __init__(
        self, swap: WeightSwap, canary: CanaryEngine | CanaryAdapter, urls: Sequence[str]
    ) -> None:
        """`urls`: of all engines."""
        self.by_name = isinstance(canary, CanaryAdapter)
        self.place, self.share = canary
        if not self.by_name and (len(urls) < 2 or self.place not in urls):
            raise ValueError("canary: one of several engines, for the others serve the rest")
        if self.by_name and len(urls) > 1:
            raise ValueError("canary: a name is for candidates on one engine; there are several")
        self.candidate: ServedWeights | None = None  # what is served there in place of `served`
        self._swap = swap
        self._others = [url for url in urls if url != self.place]

    @contextmanager
    def only(self, place: str) -> Iterator[None]:
        """What is asked meanwhile is of the candidate, or of an engine. By name the engine stands
        still as a whole, and whatever it is given its candidate is given too (see
        `vllm_adapter_transfer`): the proxy hears a version of all."""
        if not self.by_name:
            with self._swap.only(place):
                yield
        elif place == self.place:
            with self._swap.only_candidate(place):
                yield
        else:
            yield

    def begin(self) -> None:
        """The share is given the candidate."""
        where = {"model": self.place} if self.by_name else {"upstream": self.place}
        self._swap.proxy.set_canary(self.share, **where)

    def serve(
        self, new: ServedWeights, served: ServedWeights, verify: Verify | None
    ) -> dict[str, float]:
        """In its place alone, instead of the candidate before it."""
        swap = self._swap
        check = partial(verify, self.place) if verify else None
        swap.engines.ask_all()
        with swap.engines.only(self.place), swap.made_ready(new):
            try:
                # First: nobody beyond the share is to have a token of it.
                self.begin()
                with self.only(self.place):
                    seconds = swap.change(new, self.candidate or served, check)
            except BaseException:
                if self.candidate is None:
                    swap.proxy.end_canary()
                raise
        self.candidate = new
        return seconds

    def promote(self, served: ServedWeights) -> dict[str, float]:
        """To the other engines, or to all calls; it is no candidate any more."""
        assert self.candidate is not None
        swap, new = self._swap, self.candidate
        swap.engines.ask_all()
        with swap.engines.only(*self._others), swap.made_ready(new):
            if self.by_name:
                seconds = swap.change(new, served)
            else:
                seconds = roll(swap, self._others, new, served)
        self.forget()
        return seconds

    def end(self, served: ServedWeights) -> dict[str, float]:
        """Its place serves again what the others do."""
        assert self.candidate is not None
        swap = self._swap
        swap.engines.ask_all()
        with self.only(self.place):
            seconds = swap.change(served, self.candidate)
        self.forget()
        return seconds

    def forget(self) -> None:
        """There is no candidate: all have the same."""
        if self.candidate is not None:
            self.candidate = None
            self._swap.proxy.end_canary()
