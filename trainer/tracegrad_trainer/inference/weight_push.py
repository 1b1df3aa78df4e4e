"""New weights into a serving vLLM, without an error for anyone who is sampling.

Calls wait at the proxy; the engine is frozen with its running requests, takes the weights, drops
the cache that the old weights made, and goes on (`weight_swap`). How it stands still meanwhile,
paused or asleep, is `engine_sleep`'s.

Several engines go through that together, or one after the other (`rolling_push`). One of them may
serve a candidate to a share of the rollouts (`canary_push`). One that was started again gets what
is served (`weight_restore`).
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from tracegrad.events import Json
from tracegrad_trainer.inference.canary_push import CanaryAdapter, CanaryEngine, CanaryPush
from tracegrad_trainer.inference.control_routes import (
    CandidateControl,
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
from tracegrad_trainer.inference.proxy_control import ProxyControl
from tracegrad_trainer.inference.rolling_push import roll
from tracegrad_trainer.inference.wake_guard import GuardedEngine, WakeGuard
from tracegrad_trainer.inference.weight_directory import choose_directory
from tracegrad_trainer.inference.weight_files import WeightFiles
from tracegrad_trainer.inference.weight_restore import WeightRestore
from tracegrad_trainer.inference.weight_swap import Verify, WeightSwap

Carried = Literal["weights", "adapter"]
PAUSED_STAGES = ("pause", "load", "set_version", "resume")

# Seconds after which the proxy lets calls go of a trainer that is gone; the most that it takes.
HOLD_TTL_S, LONGEST_HOLD_S = 120.0, 3600.0


@dataclass(frozen=True, slots=True)
class PushReport:
    """Seconds by stage, in order: write, connect or stage, hold, pause, load, set_version, resume,
    release, verify (a first push: verify, release). Of an engine that slept: hold, sleep, write,
    wake_weights, load, set_version, wake_cache, resume, verify, release; the step that was made
    meanwhile is in none of them."""

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

    @property
    def held_s(self) -> float | None:
        """For how long new calls waited for an engine, running ones that are let end first
        included; None where it slept."""
        if self.paused_s is None:
            return None
        stages = list(self.seconds)
        first, last = stages.index("hold"), stages.index("release")
        return sum(self.seconds[stage] for stage in stages[first : last + 1]) / self.turns


class SupersededError(PushError):
    """What was to be pushed is not wanted any more: another version was returned to meanwhile."""


class WeightPusher:
    """Pushes from the one process that holds whole tensors (the trainer's rank 0), to one engine or
    to several: to all of them or to none.

    `version` and `checkpoint` are what is served now: what a failed first push returns to, but for
    `return_to_earlier_run`.
    `directory` is where the weight files go (default: see `weight_directory`). Without
    `proxy_url`, only the engine's own queue holds calls; several are those of all proxies that
    are before the engines; `proxy_key` is the proxy's control key, or its admin key. With
    `sleep` the engine does not only pause, it sleeps. `hold_ttl_s`: default two minutes, or as
    long as a request may take. With `adapter`, the content of an adapter_config.json, a push is
    of such an adapter, under peft's names, and `checkpoint` the folder of one. `transport`: how
    the files' tensors reach an engine, of its URL and `timeout_s`; default: it sees the files.
    `keep_cache`: running requests keep what the old weights computed; calls must be told apart
    by version then (vLLM's `cache_salt`), as the proxy does. `rolling`: engines change one
    after the other. `canary`: for candidates. `stages`: engines are asked to make weights ready
    while they serve, which those on GPUs do not.
    """

    def __init__(
        self,
        vllm_url: str | Sequence[str],
        proxy_url: str | Sequence[str] | None = None,
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
        canary: CanaryEngine | CanaryAdapter | None = None,
        stages: bool = True,
    ) -> None:
        files = sorted(checkpoint.glob("*.safetensors")) if checkpoint else []
        if checkpoint and not files:
            raise ValueError(f"checkpoint: no *.safetensors in {checkpoint}")
        if sleep and sleep.level == 2 and not files:
            raise ValueError("checkpoint: sleep level 2 keeps no weights; give files to return to")
        if sleep and sleep.level == 2 and adapter is not None:
            raise ValueError("adapter: sleep level 2 throws the weights beneath it away")
        urls = (vllm_url,) if isinstance(vllm_url, str) else tuple(vllm_url)
        control = transport.func if isinstance(transport, partial) else transport
        if sleep and not getattr(control, "sees_files", True):
            raise ValueError("sleep: what wakes an engine loads it from files")
        if sleep and len(urls) > 1:
            raise ValueError("sleep: only of one engine, whose GPUs the ranks share")
        self._served = _served(version, files)
        self._adapter = adapter
        self._files = WeightFiles(directory or choose_directory(None, 0))
        self._urls = urls
        self._rolls = rolling and len(urls) > 1
        if hold_ttl_s is None:
            # Nobody renews the hold of a pause, and a call that it let go would meet a paused
            # engine: its tokens would be of no known version.
            # One of several that hangs is waited for, and the others are put back.
            longest = HOLD_TTL_S + (timeout_s if len(urls) > 1 else 0)
            hold_ttl_s = HOLD_TTL_S if sleep else min(max(longest, timeout_s), LONGEST_HOLD_S)
        by_name = isinstance(canary, CanaryAdapter)
        if by_name and (adapter is None or sleep):
            raise ValueError("canary: only adapters have a name, on an engine that is awake")
        beside = {canary[0]: CandidateControl(urls[0], timeout_s)} if canary and by_name else {}
        engines = EngineGroup(urls, timeout_s, transport, beside)
        proxy = ProxyControl(proxy_url, timeout_s, key=proxy_key, hold_ttl_s=hold_ttl_s)
        halt: EngineStop = EnginePause(engines, proxy, drain_s)
        # From the first push on: an earlier run may have served other weights under these numbers.
        self._keeps_cache = keep_cache
        if sleep:
            state_dir = str(sleep.state_dir)
            guarded = GuardedEngine(
                urls[0], proxy.urls, proxy_key, hold_ttl_s, timeout_s, state_dir, sleep.level
            )
            halt = EngineSleep(
                engines,
                proxy,
                drain_s,
                level=sleep.level,
                guard=WakeGuard(guarded, self._files.lock),
                folder=self._files.folder,
            )
        connects = transport is not VllmControl
        # An adapter is loaded into the old one's place, and an engine that sleeps has no room.
        stages = stages and not (connects or sleep or adapter is not None)
        self._swap = WeightSwap(engines, proxy, halt, connects=connects, stages=stages)
        self._canary = None if canary is None else CanaryPush(self._swap, canary, urls)
        self._restore = WeightRestore(self._swap)
        self._turn = threading.RLock()  # `restore` comes from another thread
        self._returned_to: int | None = None  # by `roll_back`: nothing is pushed any more

    @property
    def version(self) -> int:
        return self._served.version

    @property
    def newest(self) -> ServedWeights:
        """What was pushed last, the candidate where there is one, and its files, which stay until
        another push has come to its end."""
        return self._candidate or self._served

    @property
    def _candidate(self) -> ServedWeights | None:
        return None if self._canary is None else self._canary.candidate

    def free_bytes(self) -> int:
        """Where the weight files are."""
        return shutil.disk_usage(self._files.folder).free

    @property
    def can_roll_back(self) -> bool:
        """False while the engine stands still for all of a step (`sleep`)."""
        return not self._swap.stopped

    def return_to_earlier_run(self, fetch: Callable[[Path], ServedWeights | None]) -> None:
        """If a first push fails, instead of to `checkpoint`. `fetch` puts the files of what that
        run left served into a folder; None: there are none."""
        self._swap.left_served = lambda: fetch(self._files.folder / "earlier-run")

    def roll_back(self, version: int, fetch: Callable[[Path], ServedWeights]) -> dict[str, float]:
        """Serves an earlier version again, under its own number, and nothing else from then on:
        what is written meanwhile is refused by `serve`. From any thread; a push under way ends
        first. `fetch` puts the version's files into a folder. Seconds by stage.

        Raises PushError, EngineLostError as `serve`; then nothing has changed.
        """
        with self._turn:
            if self._swap.stopped:
                raise PushError("vLLM sleeps while the ranks train: it serves nothing now")
            is_base = version == self.version
            if is_base and self._candidate is None:
                self._returned_to = version
                return {}
            new = self._served if is_base else fetch(self._files.folder / str(version))
            halt = self._swap.halt
            drain_s, halt.drain_s = halt.drain_s, 0.0
            # Its number was served before: what later weights computed for calls that began then
            # is in the cache under it.
            keep_cache, halt.keep_cache = halt.keep_cache, False
            try:
                with self._swap.own_watch():
                    seconds = self._return_to(new, is_base=is_base)
            except BaseException:
                halt.drain_s, halt.keep_cache = drain_s, keep_cache
                raise
            # The folder of a push under way stays: its writer is at work in it.
            self._returned_to = version
            return seconds

    def _return_to(self, new: ServedWeights, *, is_base: bool) -> dict[str, float]:
        if is_base and self._canary is not None:
            return self._canary.end(new)
        return self._serve(new, None, rolls=False)

    def stop_engine(self) -> None:
        """Calls wait, and the engine stands still, until `push` or `wake_engine`.

        Raises PushError (the engine goes on as before), EngineLostError.
        """
        with self._turn:
            self._swap.stop(self._served)

    def wake_engine(self) -> None:
        """The engine goes on with the weights that it had, unless a push has woken it.

        Raises EngineLostError.
        """
        self._swap.wake(self._served)

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
            with self._swap.watch.stage("write"):
                if self._adapter is not None:
                    files = self._files.write_adapter(version, tensors, self._adapter)
                else:
                    files = self._files.write(version, tensors)
                return _served(version, files)
        except (OSError, ValueError) as error:
            if not self._swap.stopped:
                self._swap.take_watch()
            self._files.keep_only(*self._numbers)
            raise PushError(f"version {version} is not pushed: {error}") from error

    def serve(
        self, new: ServedWeights, verify: Verify | None = None, *, as_candidate: bool = False
    ) -> PushReport:
        """Serves what was written; `as_candidate`: by the canary alone, to its share of rollouts.

        `verify` runs on the new weights, beside other calls if something was served before (of
        engines that change one after the other it is called with the URL of each); if it raises,
        the old weights return. Raises PushError (then `self.version` is still served) or
        EngineLostError.
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
                    assert self._canary is not None
                    seconds = self._canary.serve(new, self._served, verify)
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
            with self._swap.own_watch():
                seconds = self._canary.promote(self._served)
            self._served = new
            return seconds

    def restore(self) -> bool:
        """An engine that was started again gets the weights that are served, and a proxy their
        version: whether one needed it. Nothing while the engine stands still, before a first push,
        or while an engine does not answer. Raises as `serve`."""
        with self._turn:
            if self._swap.stopped or self.version < 0:
                return False
            if self._rolls or self._candidate is not None:
                return self._restore.one_by_one(self._served, self._canary)
            return self._restore.all_together(
                self._served, lambda: self._serve(self._served, None, rolls=False)
            )

    def _serve(self, new: ServedWeights, verify: Verify | None, *, rolls: bool) -> dict[str, float]:
        """To all engines. Seconds by stage."""
        swap = self._swap
        swap.engines.ask_all()
        with swap.made_ready(new):
            if rolls:
                seconds = roll(swap, self._urls, new, self._served, verify)
            else:
                seconds = swap.change(new, self._served, verify)
        is_first, self._served = self.version < 0, new
        if is_first:
            swap.proxy.end_canary()  # of a run that was killed; all engines have the same now
        if self._canary is not None:
            self._canary.forget()
        swap.halt.keep_cache = self._keeps_cache
        return seconds

    @property
    def _numbers(self) -> list[int]:
        """Of all that is served."""
        return [self.version] + ([] if self._candidate is None else [self._candidate.version])

    def close(self) -> None:
        """Removes the weight files: nothing can be put back afterwards. An engine that still
        stands still is left to the guard, with the files, if it has one."""
        halt = self._swap.halt
        if not (self._swap.stopped and halt.guarded):
            self._files.close()
            halt.close()
        self._swap.engines.close()
        self._swap.proxy.close()

    def __enter__(self) -> WeightPusher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _served(version: int, files: Iterable[Path]) -> ServedWeights:
    return ServedWeights(version, tuple(str(path) for path in files))
