"""How a CLI agent is installed and started: a small declarative file for each (`recipes/*.toml`).

A user's own stand in `.tracegrad/recipes/`, or are named by path: `--agent ./mine.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tracegrad.frameworks import Trap

# As turns are stored with (`proxy/dialects/registry.py`).
Dialect = Literal["chat", "completions", "responses", "messages", "gemini"]
Installer = Literal["npm", "pip", "apt", "shell", "none"]
SHIPPED = Path(__file__).with_name("recipes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One agent at one version.

    In `command`, the values of `environ` and the texts of `files` these stand for what is known
    when an attempt starts: `{prompt}`, `{model}`, `{base_url}` (ends in /v1), `{root_url}` (without
    it), `{api_key}`, `{home}`, `{workdir}`, `{session_id}` (a UUID).

    Attributes:
        installer, packages: what `packages` are to be given to.
        lock: what pins all of them by hash: npm's folder with package.json and package-lock.json,
            or pip's requirements file; None: only the packages' own versions are fixed.
        shell: lines that are run after it, in the sandbox or in the agent's own folder ($PREFIX).
        inherit: variables of the runner's own environment that the agent gets too.
        home: a fresh HOME for each attempt: agents leave state there.
        files: written before the agent starts: path (below HOME, or absolute) -> text.
        needs: programs that must be there beside it.
        traps: shown by `tracegrad agents show`.
        path: the file that it was read from.
    """

    name: str
    version: str
    dialect: Dialect
    installer: Installer
    command: tuple[str, ...]
    about: str = ""
    packages: tuple[str, ...] = ()
    lock: Path | None = None
    shell: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    inherit: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    home: bool = True
    needs: tuple[str, ...] = ()
    traps: tuple[Trap, ...] = ()
    path: Path | None = None

    @property
    def id(self) -> str:
        """`name@version`: a baked layer's key."""
        return f"{self.name}@{self.version}"
