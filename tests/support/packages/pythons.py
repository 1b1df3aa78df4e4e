"""Which Pythons this machine has: on PATH, of pyenv, or named in TRACEGRAD_PYTHONS."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
VARIABLE = "TRACEGRAD_PYTHONS"  # paths of interpreters, with a colon between them


def find(version: str) -> str | None:
    """The path of an interpreter of `version` ("3.12") that runs and can make an environment."""
    named = [each for each in os.environ.get(VARIABLE, "").split(os.pathsep) if each]
    on_path = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    built = sorted(str(each) for each in pyenv.glob(f"{version}.*/bin/python{version}"))
    candidates = [*named, *([on_path] if on_path else []), *reversed(built)]
    return next((each for each in candidates if _is(version, each)), None)


def _is(version: str, python: str) -> bool:
    asked = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False)
    return done.stdout.strip() == version
