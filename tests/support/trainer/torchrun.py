"""A module of the tests on several ranks, in processes of its own."""

from __future__ import annotations

import subprocess
import sys

from support.system.module_environment import environment


def torchrun(module: str, ranks: int, *arguments: object) -> None:
    """Returns once every rank is done."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = subprocess.run(
        [*command, "--module", module, *map(str, arguments)],
        env={**environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-4000:]
        raise RuntimeError(f"{module} on {ranks} ranks ended with {done.returncode}:\n{said}")
