"""A script of the tests on several ranks, in processes of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.own_modules import environment


def torchrun(script: Path, ranks: int, *arguments: object) -> None:
    """Returns once every rank is done. `script` may import what lies beside it, and `support`."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = subprocess.run(
        [*command, str(script), *map(str, arguments)],
        env={**environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-4000:]
        raise RuntimeError(f"{script.name} on {ranks} ranks ended with {done.returncode}:\n{said}")
