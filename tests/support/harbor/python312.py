"""A Python that Harbor takes, with Harbor in it: installed once for a checkout, pinned by hash."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from support.cli_agents.recipes import CACHE

ROOT = Path(__file__).resolve().parents[3]
LOCK = Path(__file__).with_name("harbor.txt")
# pyenv's commands start what this names; to others it means nothing.
_ENVIRON = {**os.environ, "PYENV_VERSION": "3.12", "PYTHONPATH": str(ROOT / "sdk")}
_INSTALL = """
import sys
from pathlib import Path
from tracegrad.runner.agent_install import install_agent
from tracegrad.runner.recipe import Recipe
harbor = Recipe(name="harbor", version="0.26.0", dialect="chat", installer="pip",
                packages=("harbor==0.26.0",), lock=Path(sys.argv[1]), command=("harbor",))
print(install_agent(harbor, Path(sys.argv[2])).folder / "bin" / "python")
"""


def harbor_python() -> str:
    """AssertionError where this machine has no Python 3.12."""
    try:
        done = subprocess.run(
            ["python3.12", "-c", _INSTALL, LOCK, CACHE],
            env=_ENVIRON,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise AssertionError("Harbor needs python3.12 in PATH; install it") from None
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout.strip()
