"""New weights into a serving vLLM, without an error for anyone who is sampling.

Calls wait at the proxy; the engine is frozen with its running requests, takes the weights, drops
the cache that the old weights made, and goes on. If anything fails, the weights that were served
before are put back, under their old version. How the engine stands still meanwhile, paused or
asleep, is `engine_sleep`'s.

Several engines go through that together, or one after the other (`rolling`), while the others take
the calls. One of them may serve a candidate to a share of the rollouts (`canary`): it is pushed to
that engine alone, and to the others when it is promoted.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from tracegrad.events import Json
from tracegrad_trainer.inference.control_routes import (
    EngineLostError,
    ProxyControl,
    PushError,
    ServedWeights,
    VllmControl,
)
from tracegrad_trainer.inference.engine_group import EngineGroup
from tracegrad_trainer.inference.engine_sleep import (
    EnginePause,
    EngineSleep,
    EngineStop,
    SleepSettings,
)
from tracegrad_trainer.inference.wake_guard import GuardedEngine, WakeGuard
from tracegrad_trainer.inference.weight_buckets import names_in_parts
from tracegrad_trainer.inference.weight_directory import choose_directory
from tracegrad_trainer.inference.weight_files import WeightFiles
from tracegrad_trainer.utils.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

Carried = Literal["weights", "adapter"]
PAUSED_STAGES = ("pause", "load", "set_version", "resume")

# Seconds after which the proxy lets calls go of a trainer that is gone; the most that it takes.
HOLD_TTL_S, LONGEST_HOLD_S = 120.0, 3600.0


@dataclass(frozen=True, slots=True)
class PushReport:
    """Seconds by stage, in order: write, connect or stage, hold, pause, load, set_version, resume,
    verify, release. Of an engine that slept: hold, sleep, write, wake_weights, load, set_version,
    wake_cache, resume, verify, release; the step that was made meanwhile is in none of them."""

    version: int
    seconds: dict[str, float]
    bytes: int  # of the files
    carried: Carried = "weights"
    turns: int = 1  # engines that changed one after the other: `seconds` are of all of them

    @property
    def paused_s(self) -> float | None:
        """For how long an engine made no token; None where it slept, for all of a step."""
        if "pause" not in self.seconds:
            return None
        return sum(self.seconds[stage] for stage in PAUSED_STAGES) / self.turns


class CanaryEngine(NamedTuple):
    """The engine that candidates are pushed to, by its URL, and the share of rollouts that it
    gets."""

    url: str
    share: float


# Raises where the new weights are not right; with the URL of an engine: of that one.
Verify = Callable[..., object]


class SupersededError(PushError):
    """What was to be pushed is not wanted any more: another version was returned to meanwhile."""


class WeightPusher:
    """Pushes from the one process that holds whole tensors (the trainer's rank 0), to one engine or
    to several: to all of them or to none.

    `version` and `checkpoint` are what is served now: what a failed first push returns to.
    `directory` is where the weight files go (default: see `weight_directory`). Without
    `proxy_url`, only the engine's own queue holds calls; `proxy_key` is the proxy's control key,
    or its admin key. With `sleep` the engine does not only pause, it sleeps. `hold_ttl_s`: default
    two minutes, or as long as a request may take. With `adapter`, the content of an
    adapter_config.json, a push is of such an adapter, under peft's names, and `checkpoint` the
    folder of one. `transport`: how the files' tensors reach an engine, of its URL and `timeout_s`;
    default: it sees the files. `keep_cache`: running requests keep what the old weights computed;
    calls must be told apart by version then (vLLM's `cache_salt`), as the proxy does. `rolling`:
    engines change one after the other. `canary`: for candidates.
    """

    def __init__(
        self,
        vllm_url: str | Sequence[str],
        proxy_url: str | None = None,
        *,
        proxy_key: str | None = None,
        version: int = 0,
        checkpoint: Path | None = None,
        directory: Path | None = None,
        drain_s: float = 2.0,
        hold_ttl_s: float | None = None,
        timeout_s: float = 300.0,
        sleep: SleepSettings | None = None,
        adapter: Json | None = None,
        transport: Callable[[str, float], VllmControl] = VllmControl,
        keep_cache: bool = False,
        rolling: bool = False,
        canary: CanaryEngine | None = None,
    ) -> None:
        files = sorted(checkpoint.glob("*.safetensors")) if checkpoint else []
        if checkpoint and not files:
            raise ValueError(f"checkpoint: no *.safetensors in {checkpoint}")
        if sleep and sleep.level == 2 and not files:
            raise ValueError("checkpoint: sleep level 2 keeps no weights; give files to return to")
        self._served = _served(version, files)
        self._candidate: ServedWeights | None = None  # what the canary serves in its place
        self._had = self._served  # what the engines at hand return to
        self._staged = False  # whether what they are to serve was made ready
        self._ready: set[str] = set()  # engines that hold such weights
        self._canary = canary
        self._adapter = adapter
        self._files = WeightFiles(directory or choose_directory(None, 0))
        urls = (vllm_url,) if isinstance(vllm_url, str) else tuple(vllm_url)
        control = transport.func if isinstance(transport, partial) else transport
        if sleep and not getattr(control, "sees_files", True):
            raise ValueError("sleep: what wakes an engine loads it from files")
        if sleep and len(urls) > 1:
            raise ValueError("sleep: only of one engine, whose GPUs the ranks share")
        if canary is not None and (len(urls) < 2 or canary.url not in urls):
            raise ValueError("canary: one of several engines, for the others serve the rest")
        self._urls = urls
        self._rolls = rolling and len(urls) > 1
        self._vllm = EngineGroup(urls, timeout_s, transport)
        self._connects = transport is not VllmControl
        # An adapter is loaded into the old one's place, and an engine that sleeps has no room.
        self._stages = not (self._connects or sleep or adapter is not None)
        if hold_ttl_s is None:
            # Nobody renews the hold of a pause, and a call that it let go would meet a paused
            # engine: its tokens would be of no known version.
            # One of several that hangs is waited for, and the others are put back.
            longest = HOLD_TTL_S + (timeout_s if len(urls) > 1 else 0)
            hold_ttl_s = HOLD_TTL_S if sleep else min(max(longest, timeout_s), LONGEST_HOLD_S)
        self._proxy = ProxyControl(proxy_url, timeout_s, key=proxy_key, hold_ttl_s=hold_ttl_s)
        self._engine: EngineStop = EnginePause(self._vllm, self._proxy, drain_s)
        # From the first push on: an earlier run may have served other weights under these numbers.
        self._keeps_cache = keep_cache
        if sleep:
            state_dir = str(sleep.state_dir)
            guarded = GuardedEngine(urls[0], proxy_url, proxy_key, hold_ttl_s, timeout_s, state_dir)
            self._engine = EngineSleep(
                self._vllm,
                self._proxy,
                drain_s,
                level=sleep.level,
                guard=WakeGuard(guarded, self._files.lock),
                folder=self._files.folder,
            )
        self._stopped = False
        self._watch = Stopwatch()
        self._turn = threading.RLock()  # `restore` comes from another thread
        self._returned_to: int | None = None  # by `roll_back`: nothing is pushed any more
        self._in_doubt = False  # whether the engine has what it says, after a `restore` that failed
        self._says_versions = (
            True  # whether an engine's word is that of the last push, as vLLM's is
        )

    @property
    def version(self) -> int:
        return self._served.version

    @property
    def newest(self) -> ServedWeights:
        """What was pushed last, the candidate where there is one, and its files, which stay until
        another push has come to its end."""
        return self._candidate or self._served

    def free_bytes(self) -> int:
        """Where the weight files are."""
        return shutil.disk_usage(self._files.folder).free

    @property
    def can_roll_back(self) -> bool:
        """False while the engine stands still for all of a step (`sleep`)."""
        return not self._stopped

    def roll_back(self, version: int, fetch: Callable[[Path], ServedWeights]) -> dict[str, float]:
        """Serves an earlier version again, under its own number, and nothing else from then on:
        what is written meanwhile is refused by `serve`. From any thread; a push under way ends
        first. `fetch` puts the version's files into a folder. Seconds by stage.

        Raises PushError, EngineLostError as `serve`; then nothing has changed.
        """
        with self._turn:
            if self._stopped:
                raise PushError("vLLM sleeps while the ranks train: it serves nothing now")
            if version == self.version and self._candidate is None:
                self._returned_to = version
                return {}
            is_base = version == self.version
            new = self._served if is_base else fetch(self._files.folder / str(version))
            pushing, self._watch = self._watch, Stopwatch()
            drain_s, self._engine.drain_s = self._engine.drain_s, 0.0
            # Its number was served before: what later weights computed for calls that began then
            # is in the cache under it.
            keep_cache, self._engine.keep_cache = self._engine.keep_cache, False
            try:
                seconds = self._end_candidate() if is_base else self._serve(new, None, rolls=False)
            except BaseException:
                self._engine.drain_s, self._engine.keep_cache = drain_s, keep_cache
                raise
            finally:
                self._watch = pushing
            # The folder of a push under way stays: its writer is at work in it.
            self._returned_to = version
            return seconds

    def stop_engine(self) -> None:
        """Calls wait, and the engine stands still, until `push` or `wake_engine`.

        Raises PushError (the engine goes on as before), EngineLostError.
        """
        with self._turn:
            if self._stopped:
                return
            self._stopped = True
            try:
                self._engine.stop(self._served, self._watch)
            except BaseException as error:
                self._end_of_failure(error)
                raise

    def wake_engine(self) -> None:
        """The engine goes on with the weights that it had, unless a push has woken it.

        Raises EngineLostError.
        """
        if not self._stopped:
            return
        watch = self._take_watch()
        try:
            self._engine.take_weights(self._served, watch)
            if not self._engine.keeps_weights:
                self._vllm.load(self._served)
            self._engine.go_on(self._served, watch)
        except PushError as error:
            raise EngineLostError(
                f"vLLM sleeps and does not wake with version {self.version}, restart it: {error}"
            ) from error
        self._open_gate(watch)

    def push(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        verify: Verify | None = None,
    ) -> PushReport:
        """Serves `tensors`, (checkpoint name, whole tensor) pairs, as policy `version`: `write`,
        then `serve`."""
        return self.serve(self.write(version, tensors), verify)

    def write(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> ServedWeights:
        """The tensors as files, one bucket of them in memory at a time; the engine goes on, or
        stands still, as before.

        Raises PushError; then what is left of the tensors was not asked for.
        """
        if version in self._numbers:
            raise ValueError(f"version: {version} is served already; give new weights a new number")
        try:
            with self._watch.stage("write"):
                if self._adapter is not None:
                    files = self._files.write_adapter(version, tensors, self._adapter)
                else:
                    files = self._files.write(version, tensors)
                return _served(version, files)
        except (OSError, ValueError) as error:
            if not self._stopped:
                self._take_watch()
            self._files.keep_only(*self._numbers)
            raise PushError(f"version {version} is not pushed: {error}") from error

    def serve(
        self, new: ServedWeights, verify: Verify | None = None, *, as_candidate: bool = False
    ) -> PushReport:
        """Serves what was written; `as_candidate`: by the canary alone, to its share of rollouts.

        `verify` runs on the new weights while other calls still wait (of engines that change one
        after the other it is called with the URL of each); if it raises, the old
        weights return. Raises PushError (then `self.version` is still served) or EngineLostError.
        """
        with self._turn:
            if self._returned_to is not None:
                self._files.keep_only(*self._numbers)
                raise SupersededError(
                    f"version {new.version} is not pushed: version {self._returned_to} was returned"
                    " to meanwhile"
                )
            # Before a first push nobody's calls come: a proxy that begins holds all.
            rolls = self._rolls and self.version >= 0 and not as_candidate
            try:
                if as_candidate:
                    seconds = self._serve_candidate(new, verify)
                else:
                    seconds = self._serve(new, verify, rolls=rolls)
            finally:
                self._files.keep_only(*self._numbers)
        size = sum(Path(path).stat().st_size for path in new.paths)
        carried: Carried = "weights" if self._adapter is None else "adapter"
        return PushReport(new.version, seconds, size, carried, len(self._urls) if rolls else 1)

    def serve_base(self, version: int, fetch: Callable[[Path], ServedWeights]) -> None:
        """An earlier version to all engines, under its own number, for a candidate to be compared
        with. Raises as `serve`."""
        with self._turn:
            if version != self.version:
                self._serve(fetch(self._files.folder / str(version)), None, rolls=False)

    def promote_candidate(self, version: int) -> dict[str, float]:
        """The candidate to all engines, one after the other, if it is of that number. Seconds by
        stage. From any thread. Raises PushError (it stays a candidate), EngineLostError."""
        with self._turn:
            new = self._candidate
            if new is None or new.version != version or self._canary is None:
                return {}
            others = [url for url in self._urls if url != self._canary.url]
            pushing, self._watch = self._watch, Stopwatch()
            try:
                self._vllm.ask_all()
                with self._vllm.only(*others), self._made_ready(new):
                    seconds = self._roll(new, None, others)
                self._proxy.end_canary()
            finally:
                self._watch = pushing
            self._served, self._candidate = new, None
            return seconds

    def restore(self) -> bool:
        """An engine that was started again gets the weights that are served, and a proxy their
        version: whether one needed it. Nothing while the engine stands still, before a first push,
        or while an engine does not answer. Raises as `serve`."""
        with self._turn:
            if self._stopped or self.version < 0:
                return False
            if self._rolls or self._candidate is not None:
                return self._restore_each()
            another = self._says_versions and self._vllm.serves(self.version) is False
            stale = self._in_doubt or another
            if not stale and not self._proxy.has_another(self.version):
                return False
            # Of a push whose files may be written just now.
            pushing, self._watch = self._watch, Stopwatch()
            self._in_doubt = True
            try:
                self._serve(self._served, None, rolls=False)
            finally:
                self._watch = pushing
            self._in_doubt = False
            self._says_versions = self._vllm.serves(self.version) is not False
            return True

    def _restore_each(self) -> bool:
        """As `restore`, of engines that do not stand still together, and may differ."""
        wanted = dict.fromkeys(self._urls, self._served)
        apart: dict[str, int] = {}
        if self._candidate is not None and self._canary is not None:
            wanted[self._canary.url] = self._candidate
            apart = {self._canary.url: self._candidate.version}
        lacking = [url for url, one in wanted.items() if self._lacks(url, one)]
        is_stale = self._proxy.has_another(self.version, of_upstreams=apart)
        if not lacking and not is_stale:
            return False
        pushing, self._watch = self._watch, Stopwatch()
        try:
            self._vllm.ask_all()
            for url in lacking:
                with self._only(url):
                    self._change(wanted[url], wanted[url], None, staged=False)
            if is_stale:  # it was started again, and holds calls until it is told
                self._proxy.set_version(self.version)
                for url, version in apart.items():
                    assert self._canary is not None
                    self._proxy.set_canary(*self._canary)
                    with self._proxy.only(url):
                        self._proxy.set_version(version)
                self._proxy.release()
        finally:
            self._watch = pushing
        self._says_versions = not any(self._lacks(url, one) for url, one in wanted.items())
        return True

    def _lacks(self, url: str, weights: ServedWeights) -> bool:
        with self._vllm.only(url):
            return self._says_versions and self._vllm.serves(weights.version) is False

    def _serve(self, new: ServedWeights, verify: Verify | None, *, rolls: bool) -> dict[str, float]:
        """To all engines. Seconds by stage."""
        self._vllm.ask_all()
        with self._made_ready(new):
            if rolls:
                seconds = self._roll(new, verify, self._urls)
            else:
                seconds = self._change(new, self._served, verify, staged=self._stages)
        self._served = new
        if self._candidate is not None:
            self._candidate = None
            self._proxy.end_canary()
        self._engine.keep_cache = self._keeps_cache
        return seconds

    @contextmanager
    def _made_ready(self, new: ServedWeights) -> Iterator[None]:
        """What takes long is done before, while the engines serve what they did; if the body fails,
        nothing is left of it with those that did not come to it."""
        if self._connects:
            self._prepare("connect", self._vllm.connect, new)
        elif self._stages:
            self._prepare("stage", lambda: self._vllm.stage(new, names_in_parts(new.paths)), new)
            self._ready = set(self._vllm.urls)
        try:
            yield
        except BaseException:
            with self._vllm.only(*self._ready):
                self._vllm.forget_staged()
            raise
        finally:
            self._ready = set()

    def _change(
        self, new: ServedWeights, had: ServedWeights, verify: Verify | None, *, staged: bool
    ) -> dict[str, float]:
        """Of the engines that are asked, all together; `had` is what they return to."""
        self._had, self._staged = had, staged
        self.stop_engine()
        watch = self._take_watch()
        try:
            self._swap(new, watch)
            if verify:
                self._verify(new, verify, watch)
        except BaseException as error:
            self._end_of_failure(error, watch)
            raise
        self._open_gate(watch)
        return watch.seconds

    def _roll(
        self, new: ServedWeights, verify: Verify | None, urls: Sequence[str]
    ) -> dict[str, float]:
        """Those engines one after the other, while the others take the calls; if one of them
        fails, those before it return to what they had. All engines serve `new` then."""
        seconds: dict[str, float] = {}
        changed: list[str] = []
        try:
            for url in urls:
                check = partial(verify, url) if verify else None
                with self._only(url):
                    found = self._change(new, self._served, check, staged=self._stages)
                changed.append(url)
                for stage, value in found.items():
                    seconds[stage] = seconds.get(stage, 0.0) + value
            self._proxy.set_version(new.version)
        except BaseException as error:
            self._take_back(changed, new, error)
            raise
        return seconds

    def _take_back(self, urls: Sequence[str], new: ServedWeights, cause: BaseException) -> None:
        """Raises EngineLostError: one of them does not take it; the others have."""
        lost: EngineLostError | None = None
        for url in reversed(urls):
            try:
                with self._only(url):
                    self._change(self._served, new, None, staged=False)
            except PushError as error:
                lost = EngineLostError(
                    f"engine {url} does not go back to version {self.version} from {new.version},"
                    f" restart it: {error} (after: {cause})"
                )
        if lost is not None:
            raise lost from cause

    def _serve_candidate(self, new: ServedWeights, verify: Verify | None) -> dict[str, float]:
        """Seconds by stage."""
        assert self._canary is not None
        url = self._canary.url
        self._vllm.ask_all()
        check = partial(verify, url) if verify else None
        with self._vllm.only(url), self._made_ready(new):
            # First: nobody beyond the share is to have a token of it.
            self._proxy.set_canary(*self._canary)
            try:
                with self._proxy.only(url):
                    seconds = self._change(new, self.newest, check, staged=self._stages)
            except BaseException:
                if self._candidate is None:
                    self._proxy.end_canary()
                raise
        self._candidate = new
        return seconds

    def _end_candidate(self) -> dict[str, float]:
        """The canary serves again what the others do. Seconds by stage."""
        assert self._candidate is not None
        assert self._canary is not None
        self._vllm.ask_all()
        with self._only(self._canary.url):
            seconds = self._change(self._served, self._candidate, None, staged=False)
        self._candidate = None
        self._proxy.end_canary()
        return seconds

    @contextmanager
    def _only(self, url: str) -> Iterator[None]:
        """Of one engine, which gets no calls while it stands still."""
        with self._vllm.only(url), self._proxy.only(url):
            yield

    @property
    def _numbers(self) -> list[int]:
        """Of all that is served."""
        return [self.version] + ([] if self._candidate is None else [self._candidate.version])

    def close(self) -> None:
        """Removes the weight files: nothing can be put back afterwards. An engine that still
        stands still is left to the guard, with the files, if it has one."""
        if not (self._stopped and self._engine.guarded):
            self._files.close()
            self._engine.close()
        self._vllm.close()
        self._proxy.close()

    def __enter__(self) -> WeightPusher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, stage: str, prepare: Callable[[], None], new: ServedWeights) -> None:
        """While calls still come, and the engine serves what it did."""
        try:
            with self._watch.stage(stage):
                prepare()
        except EngineLostError:
            raise
        except (PushError, OSError, ValueError) as error:
            self._take_watch()
            raise PushError(f"version {new.version} is not pushed: {error}") from error

    def _take_watch(self) -> Stopwatch:
        """With what was measured since the last push."""
        watch, self._watch = self._watch, Stopwatch()
        return watch

    def _open_gate(self, watch: Stopwatch) -> None:
        self._stopped = False
        self._engine.open_gate(watch)

    def _end_of_failure(self, error: BaseException, watch: Stopwatch | None = None) -> None:
        """Calls go on, unless the engine does not, and somebody else will see to that."""
        goes_on = isinstance(error, PushError) and not isinstance(error, EngineLostError)
        if goes_on or not self._engine.guarded:
            self._open_gate(watch or self._take_watch())

    def _swap(self, new: ServedWeights, watch: Stopwatch) -> None:
        """Load, set the version, go on; after a failure with the previous weights."""
        try:
            self._engine.take_weights(self._had, watch)
            self._ready -= set(self._vllm.urls)
            with watch.stage("load"):
                (self._vllm.load_staged if self._staged else self._vllm.load)(new)
            with watch.stage("set_version"):
                self._proxy.set_version(new.version)
        except Exception as error:
            self._put_back(error, watch, self._engine.take_weights)  # these may be what failed
            raise PushError(
                f"version {new.version} is not served, version {self._had.version} still is:"
                f" {error}"
            ) from error
        self._go_on(watch)

    def _put_back(
        self, cause: Exception, watch: Stopwatch, ready: Callable[[ServedWeights, Stopwatch], None]
    ) -> None:
        """Loads what was served before, once the engine is `ready`, and goes on with it."""
        if isinstance(cause, EngineLostError):
            self._save_others(watch, ready)
            raise cause
        if not self._had.paths:
            raise EngineLostError(
                f"vLLM is paused without usable weights, restart it (no checkpoint to return to): "
                f"{cause}"
            ) from cause
        try:
            ready(self._had, watch)
            self._vllm.load_again(self._had)
            self._proxy.set_version(self._had.version)
        except PushError as error:
            self._save_others(watch, ready)
            raise EngineLostError(
                f"vLLM is paused without usable weights, restart it: {error} (after: {cause})"
            ) from error
        self._go_on(watch)

    def _save_others(
        self, watch: Stopwatch, ready: Callable[[ServedWeights, Stopwatch], None]
    ) -> None:
        """Of several engines one is lost, and the trainer ends with it: the others serve what they
        did."""
        while self._vllm.lost and self._vllm.some_left and self._had.paths:
            known = len(self._vllm.lost)
            try:
                ready(self._had, watch)
                self._vllm.load_again(self._had)
                self._proxy.set_version(self._had.version)
                self._engine.go_on(self._had, watch)
                return
            except PushError as error:
                logger.warning("engines beside the lost one do not go on either: %s", error)
                if len(self._vllm.lost) == known:
                    return

    def _go_on(self, watch: Stopwatch) -> None:
        try:
            self._engine.go_on(self._had, watch)
        except PushError as error:
            self._save_others(watch, self._engine.pause_again)
            raise EngineLostError(
                f"vLLM has its weights, but does not go on, restart it: {error}"
            ) from error

    def _verify(self, new: ServedWeights, verify: Verify, watch: Stopwatch) -> None:
        try:
            with watch.stage("verify"):
                verify()
        except Exception as error:
            self._put_back(error, watch, self._engine.pause_again)
            raise PushError(
                f"version {new.version} was served wrongly, version {self._had.version} is back:"
                f" {error}"
            ) from error


def _served(version: int, files: Iterable[Path]) -> ServedWeights:
    return ServedWeights(version, tuple(str(path) for path in files))
