"""Functions over rollouts that end in every way, as a user might write them."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad.events import Reward
from tracegrad_trainer.rewards.rollout import ScoredRollout

# Where functions note that they were called: they run in other processes.
CALLS = "SCORER_CALLS"


def note(rollout: ScoredRollout, name: str) -> None:
    with Path(os.environ[CALLS]).open("a") as file:
        file.write(f"{name} {rollout.rollout_id}\n")


def resolved(rollout: ScoredRollout) -> float:
    note(rollout, "resolved")
    return float(rollout.rollout_id.endswith("1"))


def by_turns(rollout: ScoredRollout) -> int:
    return len(rollout.turns)


def last_words(rollout: ScoredRollout) -> Reward:
    return Reward(rollout_id="", value=len(rollout.last_reply), comment=rollout.last_reply)


def parts(rollout: ScoredRollout) -> dict[str, float | None]:
    return {"kind": 0.5, "brief": 1.0, "unsure": None}


def another_scorers_part(rollout: ScoredRollout) -> dict[str, float]:
    return {"by_turns": 1.0}


def cannot_tell(rollout: ScoredRollout) -> None:
    return None


def scalar(rollout: ScoredRollout) -> Any:
    return np.float32(0.25)


def text(rollout: ScoredRollout) -> str:
    return "0.5"


def not_a_number(rollout: ScoredRollout) -> float:
    return float("nan")


def raises(rollout: ScoredRollout) -> float:
    note(rollout, "raises")
    raise RuntimeError("no such\nfile")


def hangs(rollout: ScoredRollout) -> float:
    time.sleep(3600)
    return 1.0


def exits(rollout: ScoredRollout) -> float:
    os._exit(7)


def crashes(rollout: ScoredRollout) -> float:
    ctypes.string_at(0)
    return 1.0


def prints(rollout: ScoredRollout) -> float:
    print("a line on stdout", flush=True)
    print("and one on stderr", file=sys.stderr, flush=True)
    return 1.0


def fails_once(rollout: ScoredRollout) -> float:
    note(rollout, "fails_once")
    if Path(os.environ[CALLS]).read_text().count(f"fails_once {rollout.rollout_id}\n") == 1:
        os._exit(1)
    return 1.0


def waits_for_a_file(rollout: ScoredRollout) -> float:
    """Until it is there: what a kill in the middle needs."""
    note(rollout, "waits_for_a_file")
    while not Path(os.environ["SCORER_GO"]).exists():
        time.sleep(0.01)
    return 1.0
