"""`tracegrad agents`: the agents that `tracegrad run --agent NAME` knows."""

from __future__ import annotations

from typing import Annotated

import typer

from tracegrad.cli.render.agents import KnownAgent, agent_json, render_agent, render_agents
from tracegrad.cli.render.console import Terminal
from tracegrad.cli.store_option import JsonOption, fail, print_json
from tracegrad.runner.agent_install import InstallFailed, found_agent, install_agent
from tracegrad.runner.recipe import Recipe
from tracegrad.runner.recipe_files import RecipeError, find_recipe, recipe_paths

BROKEN, UNKNOWN = 1, 2

AgentArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Or NAME@VERSION, or a recipe's file.")
]

app = typer.Typer(invoke_without_command=True)


@app.callback()
def agents_command(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the agents that `tracegrad run --agent` can start.

    Your own are in .tracegrad/recipes. Ends with 1 if the file of one cannot be read.
    """
    if context.invoked_subcommand is not None:
        return
    known, broken = [], []
    for name in sorted(recipe_paths()):
        try:
            known.append(_known(find_recipe(name)))
        except RecipeError as error:
            broken.append(str(error))
    if as_json:
        print_json([agent_json(agent) for agent in known])
    else:
        terminal = Terminal()
        terminal.print(render_agents(known, terminal.width))
        typer.echo("\ntracegrad agents show NAME: how it is started, its traps and their remedies")
    for line in broken:
        typer.echo(f"tracegrad: {line}", err=True)
    if broken:
        raise typer.Exit(BROKEN)


@app.command("show")
def show_command(agent: AgentArgument, as_json: JsonOption = False) -> None:
    """Show how an agent is started, and its traps with their remedies."""
    known = _known(_find(agent))
    if as_json:
        print_json(agent_json(known))
        return
    terminal = Terminal()
    terminal.print(render_agent(known, terminal.width))


@app.command("install")
def install_command(
    agents: Annotated[list[str], typer.Argument(metavar="NAME...")],
) -> None:
    """Install agents into the cache now.

    `tracegrad run` does it before the first attempt.
    """
    for recipe in [_find(agent) for agent in agents]:
        try:
            install_agent(
                recipe, begins=lambda what: typer.echo(f"installing {what}, once", err=True)
            )
        except InstallFailed as error:
            fail(str(error), BROKEN)
        typer.echo(f"{recipe.id} is installed")


def _find(agent: str) -> Recipe:
    try:
        return find_recipe(agent)
    except RecipeError as error:
        fail(str(error), UNKNOWN)


def _known(recipe: Recipe) -> KnownAgent:
    if recipe.installer in ("none", "apt"):
        return KnownAgent(recipe, None)
    return KnownAgent(recipe, found_agent(recipe) is not None)
