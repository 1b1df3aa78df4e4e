"""How the engine stands still for new weights: paused for a moment, or asleep while ranks train.

Ranks on GPUs of their own need it for the seconds of a push: it is paused, its memory stays where
it is. Ranks that share its GPUs (`gpus.share`) need its memory for a whole step: it sleeps.
A push goes the same way through both:

    stop ─► (the ranks train) ─► take_weights ─► load, set the version ─► go_on

vLLM resumes by itself with the last memory that it gets back, so the weights and the version must
be right before `go_on`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tracegrad_trainer.inference.control_routes import (
    EngineLostError,
    PushError,
    ServedWeights,
    SleepLevel,
)
from tracegrad_trainer.inference.engine_group import EngineGroup
from tracegrad_trainer.inference.proxy_control import ProxyControl
from tracegrad_trainer.inference.wake_guard import WakeGuard, WakePlan
from tracegrad_trainer.utils.stopwatch import Stopwatch

# By what vLLM 0.32 does: at level 2 it brings back what a model calls its buffers, and no more.
_LOST_AT_LEVEL_2 = (
    "; vLLM slept at gpus.sleep_level = 2, at which it loses what it loads beside weights: does"
    " gpus.sleep_level = 1 serve them rightly?"
)
_SLEEPLESS = "gpus.share: vLLM does not sleep (was it started with --enable-sleep-mode?)"


@dataclass(frozen=True, slots=True)
class SleepSettings:
    """`level` as of vLLM; 2 throws the weights away, so that there must be files to return to.
    `state_dir` is the trainer's, for its lock."""

    level: SleepLevel
    state_dir: Path


class EngineStop(Protocol):
    """Each method raises PushError, EngineLostError, and adds its seconds to the watch."""

    keeps_weights: bool  # while it stands still
    drain_s: float  # how long calls may take that come in one piece, before the engine stops
    keep_cache: bool  # running requests go on with what earlier weights had computed
    guarded: bool  # somebody else makes it go on if this process cannot
    doubt: str  # what may have made a first push wrong, as the end of a sentence

    def stop(self, served: ServedWeights, watch: Stopwatch) -> None:
        """No call comes to the engine any more, and it computes nothing; running requests stay."""

    def take_weights(self, served: ServedWeights, watch: Stopwatch) -> None:
        """There is memory for the weights, which may be overwritten from now on."""

    def pause_again(self, served: ServedWeights, watch: Stopwatch) -> None:
        """After `go_on`: as `take_weights`, of an engine that runs."""

    def go_on(self, served: ServedWeights, watch: Stopwatch) -> None:
        """Running requests go on. Calls still wait."""

    def open_gate(self, watch: Stopwatch) -> None:
        """Calls come again."""

    def close(self) -> None: ...


class EnginePause:
    """Of an engine with GPUs, or CPUs, of its own."""

    keeps_weights = True
    guarded = False
    doubt = ""

    def __init__(self, vllm: EngineGroup, proxy: ProxyControl, drain_s: float) -> None:
        self._vllm, self._proxy, self.drain_s = vllm, proxy, drain_s
        self.keep_cache = False

    def stop(self, served: ServedWeights, watch: Stopwatch) -> None:
        with watch.stage("hold"):
            self._proxy.hold(drain_s=self.drain_s)
        with watch.stage("pause"):
            self._vllm.pause(keep_cache=self.keep_cache)

    def take_weights(self, served: ServedWeights, watch: Stopwatch) -> None:
        pass

    def pause_again(self, served: ServedWeights, watch: Stopwatch) -> None:
        # What wrong weights computed meanwhile has the version that is served again.
        self._vllm.pause()

    def go_on(self, served: ServedWeights, watch: Stopwatch) -> None:
        with watch.stage("resume"):
            self._vllm.resume()

    def open_gate(self, watch: Stopwatch) -> None:
        with watch.stage("release"):
            self._proxy.release()

    def close(self) -> None:
        pass


class EngineSleep:
    """Of an engine whose GPUs the ranks train on. `guard` is told each time what it takes to wake
    the engine as it was."""

    guarded = True

    def __init__(
        self,
        vllm: EngineGroup,
        proxy: ProxyControl,
        drain_s: float,
        *,
        level: SleepLevel,
        guard: WakeGuard,
        folder: Path,
    ) -> None:
        """`folder`: of the weight files, which the guard removes where it needs them last."""
        self._vllm, self._proxy, self.drain_s = vllm, proxy, drain_s
        self.keep_cache = False  # it goes with the sleep
        self._level: SleepLevel = level
        self._guard = guard
        self._folder = folder
        self.keeps_weights = level == 1
        self.doubt = "" if self.keeps_weights else _LOST_AT_LEVEL_2

    def stop(self, served: ServedWeights, watch: Stopwatch) -> None:
        with watch.stage("hold"):
            self._arm(served, load=not self.keeps_weights)
            self._proxy.hold(drain_s=self.drain_s)
        with watch.stage("sleep"):
            try:
                self._vllm.sleep(self._level)
            except EngineLostError:
                raise
            except PushError as error:
                self._undo(served, error)
                raise PushError(f"{_SLEEPLESS}: {error}") from error

    def take_weights(self, served: ServedWeights, watch: Stopwatch) -> None:
        with watch.stage("wake_weights"):
            self._vllm.wake("weights")
        self._arm(served, load=True)

    def pause_again(self, served: ServedWeights, watch: Stopwatch) -> None:
        self._arm(served, load=True)
        self._vllm.pause()

    def go_on(self, served: ServedWeights, watch: Stopwatch) -> None:
        self._arm(served, load=False)
        with watch.stage("wake_cache"):
            self._vllm.wake("kv_cache")
        with watch.stage("resume"):
            self._vllm.resume()

    def open_gate(self, watch: Stopwatch) -> None:
        with watch.stage("release"):
            self._guard.disarm()  # first: what it renews after the release would hold calls again
            self._proxy.release()

    def close(self) -> None:
        self._guard.close()

    def _undo(self, served: ServedWeights, cause: PushError) -> None:
        """After a sleep that failed: nobody knows how far it had come."""
        try:
            self._arm(served, load=True)
            self._vllm.pause()
            if served.paths:
                self._vllm.load(served)
            self._vllm.resume()
        except PushError as error:
            raise EngineLostError(f"{_SLEEPLESS}: {cause}; and does not go on: {error}") from error

    def _arm(self, served: ServedWeights, *, load: bool) -> None:
        first = served.version < 0
        self._guard.arm(WakePlan(served, load, open_gate=not first, folder=str(self._folder)))
