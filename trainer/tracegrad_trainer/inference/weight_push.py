"""New weights into a serving vLLM, without an error for anyone who is sampling.

Calls wait at the proxy; the engine is frozen with its running requests, takes the weights, drops
the cache that the old weights made, and goes on. If anything fails, the weights that were served
before are put back, under their old version. How the engine stands still meanwhile, paused or
asleep, is `engine_sleep`'s.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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

    @property
    def paused_s(self) -> float | None:
        """For how long the engine made no token; None where it slept, for all of a step."""
        if "pause" not in self.seconds:
            return None
        return sum(self.seconds[stage] for stage in PAUSED_STAGES)


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
    calls must be told apart by version then (vLLM's `cache_salt`), as the proxy does.
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
    ) -> None:
        files = sorted(checkpoint.glob("*.safetensors")) if checkpoint else []
        if checkpoint and not files:
            raise ValueError(f"checkpoint: no *.safetensors in {checkpoint}")
        if sleep and sleep.level == 2 and not files:
            raise ValueError("checkpoint: sleep level 2 keeps no weights; give files to return to")
        self._served = _served(version, files)
        self._adapter = adapter
        self._files = WeightFiles(directory or choose_directory(None, 0))
        urls = (vllm_url,) if isinstance(vllm_url, str) else tuple(vllm_url)
        if sleep and transport is not VllmControl:
            raise ValueError("sleep: what wakes an engine loads it from files")
        if sleep and len(urls) > 1:
            raise ValueError("sleep: only of one engine, whose GPUs the ranks share")
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
    def served(self) -> ServedWeights:
        """What is served, and its files, which stay until another push has come to its end."""
        return self._served

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
            if version == self.version:
                self._returned_to = version
                return {}
            new = fetch(self._files.folder / str(version))
            pushing, self._watch = self._watch, Stopwatch()
            drain_s, self._engine.drain_s = self._engine.drain_s, 0.0
            # Its number was served before: what later weights computed for calls that began then
            # is in the cache under it.
            keep_cache, self._engine.keep_cache = self._engine.keep_cache, False
            try:
                seconds = self._serve(new, None)
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
        verify: Callable[[], object] | None = None,
    ) -> PushReport:
        """Serves `tensors`, (checkpoint name, whole tensor) pairs, as policy `version`: `write`,
        then `serve`."""
        return self.serve(self.write(version, tensors), verify)

    def write(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> ServedWeights:
        """The tensors as files, one bucket of them in memory at a time; the engine goes on, or
        stands still, as before.

        Raises PushError; then what is left of the tensors was not asked for.
        """
        if version == self.version:
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
            self._files.keep_only(self.version)
            raise PushError(f"version {version} is not pushed: {error}") from error

    def serve(self, new: ServedWeights, verify: Callable[[], object] | None = None) -> PushReport:
        """Serves what was written.

        `verify` runs on the new weights while other calls still wait; if it raises, the old
        weights return. Raises PushError (then `self.version` is still served) or EngineLostError.
        """
        with self._turn:
            if self._returned_to is not None:
                self._files.keep_only(self.version)
                raise SupersededError(
                    f"version {new.version} is not pushed: version {self._returned_to} was returned"
                    " to meanwhile"
                )
            try:
                seconds = self._serve(new, verify)
            finally:
                self._files.keep_only(self.version)
        size = sum(Path(path).stat().st_size for path in new.paths)
        carried: Carried = "weights" if self._adapter is None else "adapter"
        return PushReport(new.version, seconds, size, carried)

    def restore(self) -> bool:
        """An engine that was started again gets the weights that are served, and a proxy their
        version: whether one needed it. Nothing while the engine stands still, before a first push,
        or while an engine does not answer. Raises as `serve`."""
        with self._turn:
            if self._stopped or self.version < 0:
                return False
            another = self._says_versions and self._vllm.serves(self.version) is False
            stale = self._in_doubt or another
            if not stale and not self._proxy.has_another(self.version):
                return False
            # Of a push whose files may be written just now.
            pushing, self._watch = self._watch, Stopwatch()
            self._in_doubt = True
            try:
                self._serve(self._served, None)
            finally:
                self._watch = pushing
            self._in_doubt = False
            self._says_versions = self._vllm.serves(self.version) is not False
            return True

    def _serve(self, new: ServedWeights, verify: Callable[[], object] | None) -> dict[str, float]:
        """Seconds by stage."""
        self._vllm.ask_all()
        if self._connects:
            self._prepare("connect", self._vllm.connect, new)
        elif self._stages:
            self._prepare("stage", lambda: self._vllm.stage(new, names_in_parts(new.paths)), new)
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
        self._served = new
        self._engine.keep_cache = self._keeps_cache
        return watch.seconds

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
            self._engine.take_weights(self._served, watch)
            with watch.stage("load"):
                (self._vllm.load_staged if self._stages else self._vllm.load)(new)
            with watch.stage("set_version"):
                self._proxy.set_version(new.version)
        except Exception as error:
            self._put_back(error, watch, self._engine.take_weights)  # these may be what failed
            raise PushError(
                f"version {new.version} is not served, version {self.version} still is: {error}"
            ) from error
        self._go_on(watch)

    def _put_back(
        self, cause: Exception, watch: Stopwatch, ready: Callable[[ServedWeights, Stopwatch], None]
    ) -> None:
        """Loads what was served before, once the engine is `ready`, and goes on with it."""
        if isinstance(cause, EngineLostError):
            self._save_others(watch, ready)
            raise cause
        if not self._served.paths:
            raise EngineLostError(
                f"vLLM is paused without usable weights, restart it (no checkpoint to return to): "
                f"{cause}"
            ) from cause
        try:
            ready(self._served, watch)
            self._vllm.load_again(self._served)
            self._proxy.set_version(self.version)
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
        while self._vllm.lost and self._vllm.some_left and self._served.paths:
            known = len(self._vllm.lost)
            try:
                ready(self._served, watch)
                self._vllm.load_again(self._served)
                self._proxy.set_version(self.version)
                self._engine.go_on(self._served, watch)
                return
            except PushError as error:
                logger.warning("engines beside the lost one do not go on either: %s", error)
                if len(self._vllm.lost) == known:
                    return

    def _go_on(self, watch: Stopwatch) -> None:
        try:
            self._engine.go_on(self._served, watch)
        except PushError as error:
            self._save_others(watch, self._engine.pause_again)
            raise EngineLostError(
                f"vLLM has its weights, but does not go on, restart it: {error}"
            ) from error

    def _verify(self, new: ServedWeights, verify: Callable[[], object], watch: Stopwatch) -> None:
        try:
            with watch.stage("verify"):
                verify()
        except Exception as error:
            self._put_back(error, watch, self._engine.pause_again)
            raise PushError(
                f"version {new.version} was served wrongly, version {self.version} is back: {error}"
            ) from error


def _served(version: int, files: Iterable[Path]) -> ServedWeights:
    return ServedWeights(version, tuple(str(path) for path in files))
