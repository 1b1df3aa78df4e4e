"""The FSDP ranks as one child: the one rank itself, or torch.distributed's launcher, and its
report of how a rank ended."""

from __future__ import annotations

import logging
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tracegrad.log_format import LOG_FORMAT_VARIABLE, LogFormat, write_json_log
from tracegrad.urls import STORE_VARIABLE
from tracegrad_trainer.config.push_transport import visible_gpus
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.machine import allocator_environment, device_environment
from tracegrad_trainer.utils.subprocesses import (
    ENGINE_KEY_VARIABLE,
    ChildError,
    ChildProcess,
    traceback_errors,
)

# The launcher's report of the rank that failed first; the others fail because of it.
_ROOT_CAUSE = re.compile(
    r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+) \(pid: (\d+)\)", re.DOTALL
)


def torchrun_command(
    ranks: int, module: str, *arguments: str, log_format: LogFormat = "text"
) -> list[str]:
    """The command that runs a module on so many ranks of this machine."""
    launcher = __name__ if log_format == "json" else "torch.distributed.run"
    command = [sys.executable, "-m", launcher, "--standalone"]
    command += [f"--nproc-per-node={ranks}", "--max-restarts=0", "--module", module]
    return [*command, *arguments]


def secret_variables(settings: TrainerSettings) -> dict[str, str]:
    """What ranks need of the settings and the file that they read does not hold, as variables."""
    found = {STORE_VARIABLE: settings.proxy.store.get_secret_value()}
    if settings.proxy.control_key is not None:
        found["TRACEGRAD_PROXY_CONTROL_KEY"] = settings.proxy.control_key.get_secret_value()
    if settings.vllm.api_key is not None:
        found[ENGINE_KEY_VARIABLE] = settings.vllm.api_key.get_secret_value()
    return found


class RankProcesses(ChildProcess):
    """Processes of `program` (a module); `resolved` is the file of settings that they read."""

    def __init__(
        self,
        settings: TrainerSettings,
        resolved: Path,
        *,
        program: str = "tracegrad_trainer.rl.serve_worker",
        arguments: Sequence[str] = (),
    ) -> None:
        # One rank needs no launcher, which would import torch for itself.
        command = [sys.executable, "-m", program, str(resolved), *arguments]
        if settings.ranks > 1:
            command = torchrun_command(
                settings.ranks, program, str(resolved), *arguments, log_format=settings.log_format
            )
        # Behind vLLM in the scheduler: agents wait for it.
        log, env = settings.logs / "ranks.log", secret_variables(settings)
        env[LOG_FORMAT_VARIABLE] = settings.log_format
        if settings.push.transport == "ipc":
            env |= allocator_environment()
        if (gpus := visible_gpus(settings)) is not None:
            env |= device_environment(gpus)
        super().__init__("ranks", command, log=log, env=env, nice=5)

    def check(self) -> None:
        """As `ChildProcess.check`; a rank that was killed is named: it could write nothing itself.

        A rank whose peer is gone aborts, and may be seen to end before that peer: the peer's
        own error comes first.
        """
        logged = self.logged() if self.exit_code() is not None else ""
        if cause := _ROOT_CAUSE.search(logged):
            rank, code, pid = (int(group) for group in cause.groups())
            explained = code == -signal.SIGABRT and traceback_errors(logged.splitlines())
            if code < 0 and not explained:
                raise ChildError(
                    f"rank {rank} (pid {pid}) was killed by {signal.Signals(-code).name}"
                    f" (log: {self.log}){self._full_disk()}"
                )
        super().check()


def _launch() -> None:
    """torch's launcher, its own log as JSON lines."""
    from torch.distributed.run import main

    write_json_log("launcher", level=logging.WARNING)
    main()


if __name__ == "__main__":
    _launch()
