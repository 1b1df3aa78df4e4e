"""The workers of a run, processes that no call needs: who scores rollouts, samples live prompts
again, or runs tasks for the gate.

`trainer serve` starts them with its other parts; beside ranks of a launcher of one's own, which
knows nothing of them, `trainer workers` does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tracegrad.log_format import LOG_FORMAT_VARIABLE
from tracegrad.urls import STORE_VARIABLE
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.run_state import is_at_work
from tracegrad_trainer.utils.subprocesses import ChildProcess

# Of the process, its log and its file in the folder `run`.
SCORERS, RESAMPLING, EVALUATOR = WORKERS = ("scorers", "resampling", "evaluator")
_MODULES = {
    SCORERS: "tracegrad_trainer.rewards.worker",
    RESAMPLING: "tracegrad_trainer.resampling.worker",
    EVALUATOR: "tracegrad_trainer.promotion.evaluator",
}


def wanted_workers(settings: TrainerSettings) -> list[str]:
    """Those that the settings have work for."""
    wanted = {
        SCORERS: settings.rewards.composes,
        RESAMPLING: settings.resample.prompts != "none",
        EVALUATOR: settings.promotion.tasks is not None,
    }
    return [name for name in WORKERS if wanted[name]]


def absent_workers(settings: TrainerSettings) -> list[str]:
    """Those of them of which none has given a sign of life in the state folder lately."""
    wanted = wanted_workers(settings)
    return [name for name in wanted if not is_at_work(settings.state_dir, name)]


def worker_process(name: str, settings: TrainerSettings, resolved: Path) -> ChildProcess:
    """`resolved`: the file of settings that it reads. The rollouts of all but scorers go through
    the proxy, ours or another's."""
    command = [sys.executable, "-m", _MODULES[name], str(resolved)]
    env = {
        STORE_VARIABLE: settings.proxy.store.get_secret_value(),
        LOG_FORMAT_VARIABLE: settings.log_format,
    }
    if name != SCORERS:
        key = settings.proxy.admin_key
        env["TRACEGRAD_URL"] = settings.url
        env["TRACEGRAD_API_KEY"] = "" if key is None else key.get_secret_value()
    # Behind vLLM in the scheduler, as the ranks.
    return ChildProcess(name, command, log=settings.logs / f"{name}.log", env=env, nice=5)
