"""Debian's packages that tests need: installed where a bare machine lets us."""

from __future__ import annotations

import os
import shutil
import subprocess


def can_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(package: str) -> None:
    """RuntimeError: nobody may here."""
    if not can_install():
        raise RuntimeError(f"the tests need a Debian package: apt-get install {package}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-q"], ["install", "-qy", package]):
        subprocess.run(["apt-get", *command], check=True, env=environment, timeout=600)
