"""Several vLLM engines that serve one policy: each request of a push goes to all of them.

A push is served by all engines or by none: what one of them refuses is taken back from the others.
They change together, or one after the other (`only`); then the proxy has a version of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from tracegrad_trainer.inference.control_routes import (
    EngineLostError,
    MemoryTag,
    PushError,
    ServedWeights,
    SleepLevel,
    VllmControl,
)


class EngineGroup:
    """As `VllmControl`, of one engine or more, side by side. An error names the engine."""

    def __init__(
        self,
        urls: Sequence[str],
        timeout_s: float,
        control: Callable[[str, float], VllmControl] = VllmControl,
        beside: Mapping[str, VllmControl] | None = None,
    ) -> None:
        """`beside`: what is asked by that name alone (`only`): a candidate on one of them."""
        if not urls:
            raise ValueError("urls: a push needs an engine")
        self._engines = {url: control(url, timeout_s) for url in urls} | dict(beside or {})
        self._is_one = len(urls) == 1
        self.urls = tuple(urls)  # of those that are asked
        self.lost: set[str] = set()  # those that did not answer, and are asked no more
        self._threads = ThreadPoolExecutor(len(urls), thread_name_prefix="engines")

    @contextlib.contextmanager
    def only(self, *urls: str) -> Iterator[None]:
        """The others are asked nothing meanwhile."""
        before, self.urls = self.urls, urls
        try:
            yield
        finally:
            self.urls = before

    def ask_all(self) -> None:
        """Those that were lost too: they may have been started again."""
        self.lost.clear()

    def serves(self, version: int) -> bool | None:
        """Whether all have these weights, in their own word: one that was started since has those
        of its start. None where one does not answer."""
        said = [self._engines[url].weight_version_soon() for url in self.urls]
        return None if None in said else all(one == str(version) for one in said)

    def connect(self) -> None:
        self._each(lambda engine: engine.connect())

    def pause(self, *, keep_cache: bool = False) -> None:
        """All of them, or none."""
        try:
            self._each(lambda engine: engine.pause(keep_cache=keep_cache))
        except PushError:
            # An engine that was not paused takes this too.
            with contextlib.suppress(PushError):
                if len(self.urls) > 1:
                    self._each(lambda engine: engine.resume())
            raise

    def resume(self) -> None:
        self._each(lambda engine: engine.resume())

    def sleep(self, level: SleepLevel) -> None:
        self._each(lambda engine: engine.sleep(level))

    def wake(self, tag: MemoryTag) -> None:
        self._each(lambda engine: engine.wake(tag))

    def stage(self, served: ServedWeights, parts: Sequence[Sequence[str]]) -> None:
        """Of engines that run. If it fails, all serve what they did."""
        self._each(lambda engine: engine.stage(served, parts))

    def forget_staged(self) -> None:
        self._each(lambda engine: engine.forget_staged())

    def load_staged(self, served: ServedWeights) -> None:
        """As `load`, of what all have staged."""
        self._each(lambda engine: engine.load_staged(served))

    def load(self, served: ServedWeights) -> None:
        """If it fails, none of them has weights that may be served."""
        self._each(lambda engine: engine.load(served))

    def load_again(self, served: ServedWeights) -> None:
        """What they served before: an engine that does not take it has nothing to serve, and is
        lost. Raises EngineLostError."""
        self._each(lambda engine: _or_lost(engine, served))

    @property
    def some_left(self) -> bool:
        """Whether some engine of those that are asked answers."""
        return not self.lost.issuperset(self.urls)

    def close(self) -> None:
        self._threads.shutdown()
        for engine in self._engines.values():
            engine.close()

    def _each(self, ask: Callable[[VllmControl], None]) -> None:
        """Waits for all; then raises the worst of what went wrong."""
        asked = {
            url: self._threads.submit(ask, self._engines[url])
            for url in self.urls
            if url not in self.lost
        }
        # Whoever puts weights back asks the same engines: none may still be at work.
        wait(asked.values())
        failed: dict[str, PushError] = {}
        for url, answer in asked.items():
            try:
                answer.result()
            except PushError as error:
                failed[url] = error
        lost = {url for url, error in failed.items() if isinstance(error, EngineLostError)}
        self.lost |= lost
        if not failed:
            return
        if self._is_one:
            raise next(iter(failed.values()))
        words = "; ".join(f"engine {url}: {error}" for url, error in failed.items())
        raise (EngineLostError if lost else PushError)(words) from next(iter(failed.values()))


def _or_lost(engine: VllmControl, served: ServedWeights) -> None:
    try:
        engine.load(served)
    except EngineLostError:
        raise
    except PushError as error:
        raise EngineLostError(str(error)) from error
