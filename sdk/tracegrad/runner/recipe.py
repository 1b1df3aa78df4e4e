"""How a CLI agent is installed and started: a small declarative file for each (`recipes/*.toml`).

A user's own stand in `.tracegrad/recipes/`, or are named by path: `--agent ./mine.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Dialect = Literal["openai_chat", "openai_responses", "anthropic", "gemini"]
Installer = Literal["npm", "pip", "apt", "shell", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One agent at one version.

    In `command`, the values of `environ` and the texts of `files` these stand for what is known
    when an attempt starts: `{prompt}`, `{model}`, `{base_url}` (ends in /v1), `{root_url}` (without
    it), `{api_key}`, `{home}`, `{workdir}`, `{session_id}`.

    Attributes:
        installer, packages: what `packages` are to be given to.
        shell: lines that are run after it, in the sandbox or in the agent's own folder.
        home: a fresh HOME for each attempt: agents leave state there.
        files: written before the agent starts: path (below HOME, or absolute) -> text.
        needs: programs that must be in the image, such as `node>=22`.
        traps: what goes wrong with this agent, each with its remedy: shown by `--agent NAME --help`
            and by `tracegrad agents`.
    """

    name: str
    version: str
    dialect: Dialect
    installer: Installer
    command: tuple[str, ...]
    packages: tuple[str, ...] = ()
    shell: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    home: bool = True
    needs: tuple[str, ...] = ()
    traps: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """`name@version`: a baked layer's key."""
        return f"{self.name}@{self.version}"
