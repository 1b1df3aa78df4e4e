"""A virtual environment for each framework, from its pinned requirements: their pins exclude each
other. Installed once, into a cache that all checkouts share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tracegrad.runner.agent_install import install_agent
from tracegrad.runner.recipe import Recipe

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = ROOT / "tests" / "frameworks" / "requirements"


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "tracegrad-tests" / "frameworks"


def framework_python(name: str) -> Path:
    """Its folder's name has a digest of the pins and of this Python's version.

    This project is not installed into it, since another checkout may use the same one: it is
    imported by PYTHONPATH (`environment`). Raises InstallFailed.
    """
    pins = tuple(pinned(name))
    recipe = Recipe(
        name=name,
        version="pinned",
        dialect="chat",
        installer="pip",
        packages=pins,
        command=("python",),
    )
    with pytest.MonkeyPatch.context() as patched:
        # Compiling all modules takes as long as installing them, and most are never imported.
        patched.setenv("PIP_COMPILE", "0")
        return install_agent(recipe, cache()).folder / "bin" / "python"


def pinned(name: str) -> list[str]:
    """The lines of its requirements: all of them exact versions."""
    lines = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]
