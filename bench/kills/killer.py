"""Kills a process at a random moment, waits until everything is up again, kills another."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.kills.kept_serve import KeptServe

VICTIMS = ("vllm", "engine", "proxy", "rank 0", "rank 1", "serve", "postgresql")
# Between everything being up and the next kill, seconds: a step and a push of the demo fit in.
CALM_S = (0.5, 8.0)
UP_AGAIN_S = 300.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Kill:
    victim: str
    doing: str  # what the ranks did then
    up_again_s: float  # until everything was
    at: float  # by the monotonic clock


class Killer:
    """A thread, from `start` until `done`: `kills` of them in all, each victim as often as another,
    in an order of `seed`'s."""

    def __init__(
        self,
        serve: KeptServe,
        steps: Callable[[], int],
        kills: int,
        seed: int,
        minutes: float,
        say: Callable[[str], None],
    ) -> None:
        """`steps`: how many are committed. `minutes`: after which no more are killed."""
        self._minutes = minutes
        self._serve = serve
        self._steps = steps
        self._random = random.Random(seed)
        self._order = _rounds(kills, self._random)
        self._say = say
        self.kills: list[Kill] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def done(self) -> bool:
        """Raises what went wrong: something did not come up again."""
        if self.error is not None:
            raise self.error
        return not self._thread.is_alive() and self._thread.ident is not None

    def _run(self) -> None:
        deadline = time.monotonic() + 60 * self._minutes
        try:
            for number, victim in enumerate(self._order, start=1):
                if time.monotonic() > deadline:
                    break
                time.sleep(self._random.uniform(*CALM_S))
                kill = self._kill(victim)
                self.kills.append(kill)
                self._say(
                    f"kill {number} of {len(self._order)}: {victim} while {kill.doing};"
                    f" everything up again after {kill.up_again_s:.1f} s"
                )
        except BaseException as error:
            self.error = error

    def _kill(self, victim: str) -> Kill:
        if victim == "postgresql":
            return self._kill_database()
        while (pid := self._serve.pid_of(victim)) is None:
            time.sleep(_POLL_S)
        doing, starts = self._serve.doing(), self._serve.starts()
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        # Before it is noticed everything still seems to be up.
        self._wait(lambda: self._serve.starts() != starts, at, victim)
        self._wait(self._serve.is_serving, at, victim)
        return Kill(victim, doing, time.monotonic() - at, at)

    def _kill_database(self) -> Kill:
        """It is started again at once, as by an init system."""
        doing, steps = self._serve.doing(), self._steps()
        at = time.monotonic()
        self._serve.database.kill()
        self._serve.database.start()
        # Ranks that find it gone are started again: all is up that has made a step since.
        self._wait(lambda: self._steps() > steps, at, "postgresql")
        self._wait(self._serve.is_serving, at, "postgresql")
        return Kill("postgresql", doing, time.monotonic() - at, at)

    def _wait(self, what: Callable[[], bool], since: float, victim: str) -> None:
        while not what():
            if time.monotonic() - since > UP_AGAIN_S:
                raise TimeoutError(f"{victim} was killed, and is not back after {UP_AGAIN_S:.0f} s")
            time.sleep(_POLL_S)


def _rounds(kills: int, rng: random.Random) -> Sequence[str]:
    order: list[str] = []
    while len(order) < kills:
        order += rng.sample(VICTIMS, len(VICTIMS))
    return order[:kills]
