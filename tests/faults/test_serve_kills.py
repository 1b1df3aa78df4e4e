"""`trainer serve`, killed with SIGKILL in the middle of a push while agents work, and started anew:
what is served, the ledger and the weights agree, and no turn is trained twice or lost."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from support.agents.group_load import GroupLoad, missing_calls
from support.trainer.kill_runs import fates
from support.trainer.prepared_run import steps_of
from support.trainer.pushing_ranks import agree
from support.trainer.trainer_serve import TrainerServe, trainer_serve
from tracegrad.store import Store
from tracegrad_trainer.config.loading import parse_resolved

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]
PROMPT = [3 + 5 * i % 80 for i in range(24)]


@pytest.mark.parametrize(("victim", "every_steps"), [("serve", 1), ("ranks", 1), ("ranks", 3)])
def test_killed_in_a_push_it_comes_back_with_what_was_committed(
    victim: str, every_steps: int, char_model: Path, tmp_path: Path
) -> None:
    checkpoint = {"checkpoint.every_steps": every_steps, "checkpoint.idle_s": 1.0}
    settings = {"model": char_model, "max_restarts": 0, **checkpoint}
    state_dir = tmp_path / "state"
    with trainer_serve(state_dir, settings) as run:
        run.wait_serving()
        with GroupLoad(run.url) as crowd:
            run.wait(lambda: run.last_step() >= 1)
            run.wait(lambda: run.doing() == "pushing")
            kill(run, victim)
            run.process.wait(60)
            assert run.family.gone(within_s=30) == []
    before = run.last_step()
    with trainer_serve(state_dir, settings) as run:
        run.wait_serving()
        # Not by the step's own version: a lost one makes its weights be served as a later one.
        run.wait(lambda: run.doing() == "waiting" and serves(run) == run.last_step() >= before)
        agree(parse_resolved((state_dir / "run" / "settings.json").read_text()), PROMPT)
        steps = steps_of(run.store_url)
    assert missing_calls(run.store_url, [crowd.toys]) == []
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    trained = Counter(step for step, _ in fates(run.store_url).values() if step is not None)
    assert trained == {step.step: step.metrics["turns_trained"] for step in steps}
    with Store.open(run.store_url, create=False) as store:
        counts = store.turn_counts({"split": "train"})
    assert counts.captured == counts.trained + sum(counts.skipped.values()) + sum(
        counts.pending.values()
    )
    assert set(counts.pending) <= {"open", "waiting", "ready"}, "nothing is left leased"


def serves(run: TrainerServe) -> int:
    """The step whose weights were pushed last."""
    with Store.open(run.store_url, create=False) as store:
        return max(store.versions(), key=lambda version: version.version).step or 0


def kill(run: TrainerServe, victim: str) -> None:
    if victim == "serve":
        run.process.kill()
    else:
        os.kill(run.pid_of("ranks"), signal.SIGKILL)
