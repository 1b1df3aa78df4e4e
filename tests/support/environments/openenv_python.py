"""OpenEnv with its traces, in a Python of its own, installed once."""

from __future__ import annotations

from pathlib import Path

from support import environments
from support.cli_agents.recipes import CACHE
from tracegrad.runner.agent_install import install_agent
from tracegrad.runner.recipe import Recipe

SCRIPTS = Path(environments.__file__).parent
OPENENV = Recipe(
    name="openenv-trace",
    version="0.10.0",
    dialect="chat",
    installer="pip",
    lock=SCRIPTS / "openenv_trace.txt",
    packages=("openenv==0.10.0",),
    command=("python",),
)


def openenv_python() -> Path:
    return install_agent(OPENENV, CACHE).folder / "bin" / "python"
