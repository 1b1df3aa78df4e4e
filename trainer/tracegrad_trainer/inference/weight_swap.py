"""One stand-still of vLLM for new weights, of the engines that are asked, all together.

    stop ─► take weights ─► load ─► set the version ─► go on ─► open the gate ─► verify

Nobody waits for the verification, but before a first push, whose path nobody knows, and behind a
sleep, which its guard ends: there the gate opens last. What is sampled by weights that turn out
wrong has the number of a version that failed, and is never trained.

If anything fails, the weights that were served before are put back, under their old version. Which
engines stand still when is not decided here: `weight_push`, `rolling_push`, `canary_push`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tracegrad_trainer.inference.control_routes import (
    EngineLostError,
    PushError,
    ServedWeights,
)
from tracegrad_trainer.inference.engine_group import EngineGroup
from tracegrad_trainer.inference.engine_sleep import EngineStop
from tracegrad_trainer.inference.proxy_control import ProxyControl
from tracegrad_trainer.inference.weight_buckets import names_in_parts
from tracegrad_trainer.utils.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

# Raises where the new weights are not right; with the URL of an engine: of that one.
Verify = Callable[..., object]


class WeightSwap:
    """`halt`: how the engines stand still. `connects`: their transport wants to be connected
    before a load; `stages`: they can make weights ready while they serve others.

    What is asked goes to `engines.urls`; `only` and `only_candidate` narrow it to one. Each method
    raises PushError (what was served before still is) or EngineLostError.
    """

    def __init__(
        self,
        engines: EngineGroup,
        proxy: ProxyControl,
        halt: EngineStop,
        *,
        connects: bool,
        stages: bool,
    ) -> None:
        self.engines, self.proxy, self.halt = engines, proxy, halt
        self.connects, self.stages = connects, stages
        self.stopped = False
        # Whether the engines may have something else than they say, after a change that failed.
        self.in_doubt = False
        # Before a first push: what an earlier run left served, if there are files of it.
        self.left_served: Callable[[], ServedWeights | None] = lambda: None
        self.watch = Stopwatch()
        self._ready: set[str] = set()  # engines that have made ready what they are to serve

    @contextmanager
    def only(self, url: str) -> Iterator[None]:
        """Of one engine, which gets no calls while it stands still."""
        with self.engines.only(url), self.proxy.only(url):
            yield

    @contextmanager
    def only_candidate(self, name: str) -> Iterator[None]:
        """Of the candidate that has that name on an engine, which stands still as a whole."""
        with self.engines.only(name), self.proxy.of_candidate(name):
            yield

    @contextmanager
    def own_watch(self) -> Iterator[None]:
        """What is done meanwhile counts for no push whose files may be written just now."""
        pushing, self.watch = self.watch, Stopwatch()
        try:
            yield
        finally:
            self.watch = pushing

    def take_watch(self) -> Stopwatch:
        """With what was measured since the last push."""
        watch, self.watch = self.watch, Stopwatch()
        return watch

    @contextmanager
    def made_ready(self, new: ServedWeights) -> Iterator[None]:
        """What takes long is done before, while the engines serve what they did; if the body fails,
        nothing is left of it with those that did not come to it."""
        if self.connects:
            self._prepare("connect", self.engines.connect, new)
        elif self.stages:
            self._prepare("stage", lambda: self.engines.stage(new, names_in_parts(new.paths)), new)
            self._ready = set(self.engines.urls)
        try:
            yield
        except BaseException:
            with self.engines.only(*self._ready):
                self.engines.forget_staged()
            raise
        finally:
            self._ready = set()

    def stop(self, served: ServedWeights) -> None:
        """Calls wait, and the engines stand still, until `change` or `wake`."""
        if self.stopped:
            return
        self.stopped = True
        try:
            self.halt.stop(served, self.watch)
        except BaseException as error:
            self._end_of_failure(error)
            raise

    def wake(self, served: ServedWeights) -> None:
        """They go on with the weights that they had, unless `change` has woken them."""
        if not self.stopped:
            return
        watch = self.take_watch()
        try:
            self.halt.take_weights(served, watch)
            if not self.halt.keeps_weights:
                self.engines.load(served)
            self.halt.go_on(served, watch)
        except PushError as error:
            raise EngineLostError(
                f"vLLM sleeps and does not wake with version {served.version}, restart it: {error}"
            ) from error
        self._open_gate(watch)

    def change(
        self, new: ServedWeights, had: ServedWeights, verify: Verify | None = None
    ) -> dict[str, float]:
        """From `had`, to which they return if it fails, to `new`. Seconds by stage."""
        self.stop(had)
        watch = self.take_watch()
        try:
            self._load(new, had, watch)
            if opens_early := had.version >= 0 and not self.halt.guarded:
                self._open_gate(watch)
            if verify:
                self._verify(new, had, verify, watch)
        except BaseException as error:
            self._end_of_failure(error, watch)
            raise
        if not opens_early:
            self._open_gate(watch)
        self.in_doubt = False
        return watch.seconds

    def _prepare(self, stage: str, prepare: Callable[[], None], new: ServedWeights) -> None:
        """While calls still come, and the engines serve what they did."""
        try:
            with self.watch.stage(stage):
                prepare()
        except EngineLostError:
            raise
        except (PushError, OSError, ValueError) as error:
            self.take_watch()
            raise PushError(f"version {new.version} is not pushed: {error}") from error

    def _load(self, new: ServedWeights, had: ServedWeights, watch: Stopwatch) -> None:
        """Load, set the version, go on; after a failure with the previous weights."""
        urls = set(self.engines.urls)
        is_ready = bool(self._ready) and urls <= self._ready
        try:
            self.halt.take_weights(had, watch)
            self._ready -= urls
            with watch.stage("load"):
                (self.engines.load_staged if is_ready else self.engines.load)(new)
            with watch.stage("set_version"):
                self.proxy.set_version(new.version)
        except Exception as error:
            had = self._to_return_to(had)
            self._put_back(had, error, watch, self.halt.take_weights)  # these may be what failed
            kept = f"{_named(had)} still is"
            raise PushError(f"version {new.version} is not served, {kept}: {error}") from error
        # Before a first version nobody has said that what is served is right.
        self._go_on(new if had.version >= 0 else had, had, watch)

    def _verify(
        self, new: ServedWeights, had: ServedWeights, verify: Verify, watch: Stopwatch
    ) -> None:
        try:
            with watch.stage("verify"):
                verify()
        except Exception as error:
            doubt = "" if had.version >= 0 else self.halt.doubt
            had = self._to_return_to(had)
            self._put_back(had, error, watch, self.halt.pause_again)
            back = f"{_named(had)} is back"
            raise PushError(
                f"version {new.version} was served wrongly, {back}: {error}{doubt}"
            ) from error

    def _to_return_to(self, had: ServedWeights) -> ServedWeights:
        return had if had.version >= 0 else self.left_served() or had

    def _put_back(
        self,
        had: ServedWeights,
        cause: Exception,
        watch: Stopwatch,
        ready: Callable[[ServedWeights, Stopwatch], None],
    ) -> None:
        """Loads what was served before, once the engines are `ready`, and goes on with it."""
        if isinstance(cause, EngineLostError):
            self._save_others(had, watch, ready)
            raise cause
        if not had.paths:
            raise EngineLostError(
                f"vLLM is paused without usable weights, restart it (no checkpoint to return to): "
                f"{cause}"
            ) from cause
        try:
            ready(had, watch)
            self.engines.load_again(had)
            self.proxy.take_back(had.number)
        except PushError as error:
            self._save_others(had, watch, ready)
            raise EngineLostError(
                f"vLLM is paused without usable weights, restart it: {error} (after: {cause})"
            ) from error
        self._go_on(had, had, watch)

    def _save_others(
        self,
        had: ServedWeights,
        watch: Stopwatch,
        ready: Callable[[ServedWeights, Stopwatch], None],
    ) -> None:
        """Of several engines one is lost, and the trainer ends with it: the others serve what they
        did."""
        while self.engines.lost and self.engines.some_left and had.paths:
            known = len(self.engines.lost)
            try:
                ready(had, watch)
                self.engines.load_again(had)
                self.proxy.take_back(had.number)
                self.halt.go_on(had, watch)
                return
            except PushError as error:
                logger.warning("engines beside the lost one do not go on either: %s", error)
                if len(self.engines.lost) == known:
                    return

    def _go_on(self, has: ServedWeights, had: ServedWeights, watch: Stopwatch) -> None:
        """With what the engines have now. `had`: what those beside one that is lost go back to."""
        try:
            self.halt.go_on(has, watch)
        except PushError as error:
            self._save_others(had, watch, self.halt.pause_again)
            raise EngineLostError(
                f"vLLM has its weights, but does not go on, restart it: {error}"
            ) from error

    def _open_gate(self, watch: Stopwatch) -> None:
        self.stopped = False
        self.halt.open_gate(watch)

    def _end_of_failure(self, error: BaseException, watch: Stopwatch | None = None) -> None:
        """Calls go on, unless the engine does not, and somebody else will see to that."""
        self.in_doubt = self.in_doubt or isinstance(error, EngineLostError)
        goes_on = isinstance(error, PushError) and not isinstance(error, EngineLostError)
        if goes_on or not self.halt.guarded:
            self._open_gate(watch or self.take_watch())


def _named(had: ServedWeights) -> str:
    return f"version {had.version}" if had.version >= 0 else "version 0 (the model's folder)"
