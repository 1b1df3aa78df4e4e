"""`torchrun` as a container's process, ended in order: `run_ranks.py SETTINGS TORCHRUN-OPTION...`.

torchrun gives its ranks 30 s after a signal, and with them goes the step under way. Rank 0, asked
itself, finishes the step and its checkpoint, and all other ranks end with it, those of other hosts
too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import FrameType

from tracegrad_trainer.launch.run_state import read_state

PROGRAM = "tracegrad_trainer.rl.serve_worker"


class Launcher:
    """torchrun, and rank 0 behind it where that is one of ours."""

    def __init__(self, settings: Path, options: list[str]) -> None:
        self.state_dir = Path(tomllib.loads(settings.read_text(encoding="utf-8"))["state_dir"])
        self.has_rank_zero = not any(
            option.startswith("--node-rank=") and option != "--node-rank=0" for option in options
        )
        self.asked = False
        self.process = subprocess.Popen(
            ["torchrun", *options, "-m", PROGRAM, str(settings)],
            # Files in the working directory hide no library.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )

    def stop(self, number: int, frame: FrameType | None) -> None:
        """The first signal is for rank 0, a second one for torchrun."""
        first, self.asked = not self.asked, True
        if not first:
            self.process.send_signal(number)
        elif self.has_rank_zero:
            state = read_state(self.state_dir, "ranks")
            if state is not None and state["alive"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(state["pid"], signal.SIGTERM)
            else:  # it has not begun
                self.process.send_signal(number)


def main() -> int:
    launcher = Launcher(Path(sys.argv[1]), sys.argv[2:])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, launcher.stop)
    code = launcher.process.wait()
    if code == 0 and launcher.has_rank_zero and not launcher.asked:
        print("the run is over; waiting to be stopped", file=sys.stderr, flush=True)
        # Whoever starts a container again that ended would begin it once more, without end.
        while not launcher.asked:
            time.sleep(0.5)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
