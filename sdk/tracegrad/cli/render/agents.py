"""`tracegrad agents`: recipes as a person reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from tracegrad.cli.render.console import hanging
from tracegrad.cli.render.table import TableColumn, render_table
from tracegrad.inspect.display_text import printable
from tracegrad.runner.recipe import SHIPPED, Recipe

_LABEL = 12


@dataclass(frozen=True, slots=True)
class KnownAgent:
    """`installed`: its programs are in this machine's cache; None: there are none to install."""

    recipe: Recipe
    installed: bool | None

    @property
    def source(self) -> str:
        path = self.recipe.path
        return "" if path is None or path.parent == SHIPPED else str(path)


def render_agents(agents: Sequence[KnownAgent], width: int | None) -> list[Text]:
    columns: list[TableColumn[KnownAgent]] = [
        TableColumn("name", lambda agent: Text(agent.recipe.name)),
        TableColumn("version", lambda agent: Text(agent.recipe.version)),
        TableColumn("dialect", lambda agent: Text(agent.recipe.dialect)),
        TableColumn("installed", lambda agent: Text(_yes(agent.installed))),
        TableColumn("traps", lambda agent: Text(str(len(agent.recipe.traps))), "right"),
        TableColumn("about", _about, min_width=10, drop_order=1),
    ]
    return render_table(columns, agents, width)


def _yes(installed: bool | None) -> str:
    return {True: "yes", False: "no", None: "nothing to"}[installed]


def _about(agent: KnownAgent) -> Text:
    about = Text(printable(agent.recipe.about))
    return about.append(f"  {agent.source}".rstrip(), style="dim")


def render_agent(agent: KnownAgent, width: int | None) -> Iterator[Text]:
    recipe = agent.recipe
    yield Text(f"{recipe.id}  {printable(recipe.about)}".rstrip(), style="bold")
    packages = " ".join(recipe.packages)
    pinned = ", all of it pinned by hash" if recipe.lock is not None else ""
    rows = {
        "dialect": recipe.dialect,
        "installed": _yes(agent.installed),
        "from": f"{recipe.installer} {packages}{pinned}".strip(),
        "needs": " ".join(recipe.needs),
        "command": " ".join(recipe.command),
        "environ": " ".join(recipe.environ),
        "files": " ".join(recipe.files),
        "recipe": str(recipe.path),
    }
    for name, value in rows.items():
        if value:
            yield from _row(name, value, width)
    for trap in recipe.traps:
        yield Text()
        yield from _row("trap", trap.what, width)
        yield from _row("remedy", trap.remedy, width)


def _row(name: str, value: str, width: int | None) -> Iterator[Text]:
    label = Text(name, style="dim")
    yield from hanging(label, Text(printable(value)), column=_LABEL, width=width)


def agent_json(agent: KnownAgent) -> dict[str, Any]:
    recipe = agent.recipe
    return {
        "name": recipe.name,
        "version": recipe.version,
        "dialect": recipe.dialect,
        "about": recipe.about,
        "installer": recipe.installer,
        "packages": list(recipe.packages),
        "pinned_by_hash": recipe.lock is not None,
        "installed": agent.installed,
        "command": list(recipe.command),
        "environ": dict(recipe.environ),
        "files": dict(recipe.files),
        "needs": list(recipe.needs),
        "traps": [{"what": trap.what, "remedy": trap.remedy} for trap in recipe.traps],
        "path": None if recipe.path is None else str(recipe.path),
    }
