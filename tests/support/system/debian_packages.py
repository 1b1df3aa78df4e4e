"""Debian's packages that tests need: installed where a bare machine lets us."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


def can_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(package: str) -> None:
    """RuntimeError: nobody may here."""
    if not can_install():
        raise RuntimeError(f"the tests need a Debian package: apt-get install {package}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # Tests run side by side, and apt takes one at a time.
    with (Path(tempfile.gettempdir()) / "tracegrad-tests-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (["update", "-q"], ["install", "-qy", package]):
            waits = ["-o", "DPkg::Lock::Timeout=600"]
            subprocess.run(["apt-get", *waits, *command], check=True, env=environment, timeout=900)
