"""Optimizer steps on what the store holds: no agents, no vLLM, no weight push.

The program of one rank. `trainer step` starts it under torch.distributed's launcher; by hand it
is, on one node or on several:

    torchrun --nproc-per-node 2 -m tracegrad_trainer.rl.offline_worker SETTINGS.json --steps 3
"""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import ExitStack
from functools import partial

from tracegrad.store import Store
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.run_journal import Ending
from tracegrad_trainer.launch.session import max_steps_reached
from tracegrad_trainer.rl.coordinator import RolloutSupply
from tracegrad_trainer.rl.preflight import check_before_training, check_store_has_groups
from tracegrad_trainer.rl.rank_main import StopFlag, run_rank
from tracegrad_trainer.rl.train_loop import TrainLoop
from tracegrad_trainer.utils.distributed import launch_rank, run_on_rank_zero

# Run with -m, where __name__ is "__main__".
logger = logging.getLogger("tracegrad_trainer.rl.offline_worker")


def take_steps(
    settings: TrainerSettings, stack: ExitStack, stop: StopFlag, *, steps: int | None
) -> None:
    """At most `steps` optimizer steps (None: as many as there is something for), all of them
    committed on return. How it ended is the run state's `said`.

    Raises:
        ValueError, CheckpointError: what is wrong before anything starts; on rank 0.
    """
    if launch_rank() == 0:
        with Store.open(settings.proxy.store) as store:
            check_before_training(settings, store)
            check_store_has_groups(settings, store)
    training = TrainLoop(settings, stack, stopping=stop, supply=RolloutSupply(is_open=False))
    training.resume()
    taken = 0
    while (steps is None or taken < steps) and training.next_action() == "train":
        taken += training.train_batch()
    training.commit_pending()
    ending, said = run_on_rank_zero(partial(_how_it_ended, training, taken, steps))
    training.report_stage("stopped", taken=taken, ending=ending, said=said)
    logger.info(said)


def _how_it_ended(training: TrainLoop, taken: int, steps: int | None) -> tuple[Ending, str]:
    made = f"{taken} step{'' if taken == 1 else 's'} taken, now at step {training.step}"
    if training.stopping():
        return "signal", f"{made}; stopped by a signal"
    if reached := max_steps_reached(training.settings, training.step):
        return "max_steps", f"{made}; {reached}"
    if (held := training.leading.guard_hold()) is not None:
        return "done", (
            f"{made}; {held}. Training stays paused, in the next `trainer serve` too, until you let"
            " it go on (trainer resume --why TEXT) or go back (trainer rollback)"
        )
    if steps is not None and taken == steps:
        return "done", made
    return "done", f"{made}; {training.leading.explain_no_batch()}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tracegrad_trainer.rl.offline_worker")
    parser.add_argument("settings", help="a JSON file of resolved settings, or TOML")
    parser.add_argument("--steps", type=int, default=None, help="default: while there is work")
    given = parser.parse_args(arguments)
    return run_rank(given.settings, partial(take_steps, steps=given.steps))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
