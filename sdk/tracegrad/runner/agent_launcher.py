"""From a task that names an agent to what is run for it: recipes, their programs, a HOME for each
attempt."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from tracegrad.context import Rollout
from tracegrad.private_files import open_private
from tracegrad.runner.agent_install import InstalledAgent, install_agent
from tracegrad.runner.agent_layer import AgentLayer, agent_layer, starter
from tracegrad.runner.launch import LaunchValues, local_environ, make_launch, session_id
from tracegrad.runner.recipe import SHIPPED, Recipe
from tracegrad.runner.recipe_files import RecipeError, find_recipe
from tracegrad.runner.sandbox import Sandbox
from tracegrad.runner.task import AgentCommand, Task

# In a container, where all but this may be read-only.
HOME_INSIDE = "/tmp/tracegrad-home"


class AgentLauncher:
    """Called for each attempt, in its sandbox (`attempt.Prepare`).

    A process of this machine gets a HOME and a folder for temporary files of its own, which are
    removed once its rollout has ended: when another one begins, and when this is closed.
    """

    def __init__(self, *, model: str, cache: Path | None = None) -> None:
        """`model`: its name in calls to the proxy. `cache`: of the agents' programs."""
        self._model, self._cache = model, cache
        self._named: dict[str, Recipe] = {}  # by what a task calls it
        self._recipes: dict[str, Recipe] = {}
        self._installed: dict[str, InstalledAgent] = {}
        self._homes: dict[Path, Rollout] = {}
        self._root: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, task: Task, *, begins: Callable[[str], object] = lambda what: None) -> Task:
        """Before its first attempt: reads the agent's recipe, and installs what is not there; for a
        container that is what is baked into its image. The task as it is run then.

        Raises RecipeError, InstallFailed, and ValueError for a prompt that no command can hold.
        """
        if task.command is not None or task.agent is None:
            return task
        recipe = self._recipe(task.agent)
        make_launch(recipe, self._values(task, "http://host/v1", "key", "/", "/", "id"))
        contained = task.sandbox.image is not None or task.sandbox.build is not None
        if recipe.id not in self._installed and (not contained or recipe.installer != "apt"):
            self._installed[recipe.id] = install_agent(recipe, self._cache, begins=begins)
        if not contained:
            check_programs(recipe, self._installed[recipe.id])
        return replace(task, agent=recipe.name, sandbox=replace(task.sandbox, recipe=recipe.id))

    def _recipe(self, agent: str) -> Recipe:
        """Read once a run: what is changed meanwhile is the next run's. Raises RecipeError."""
        if agent not in self._named:
            recipe = find_recipe(agent)
            if self._recipes.setdefault(recipe.id, recipe) != recipe:
                raise RecipeError(
                    f"{recipe.path}: {self._recipes[recipe.id].path} is {recipe.id}, too; give one"
                    " of them another name or version"
                )
            self._named[agent] = recipe
        return self._named[agent]

    @property
    def own_recipes(self) -> list[Recipe]:
        """Those that are not ours: whoever wrote the folder that one stands in, wrote them."""
        return [
            recipe
            for recipe in self._recipes.values()
            if recipe.path is not None and recipe.path.parent != SHIPPED
        ]

    def layer(self, recipe_id: str) -> AgentLayer:
        """Of a recipe that a task was added with (`SandboxSpec.recipe`)."""
        recipe = self._recipes[recipe_id]
        here = recipe.installer not in ("apt", "none")
        return agent_layer(recipe, self._installed[recipe_id] if here else None)

    def __call__(self, task: Task, opened: Rollout, sandbox: Sandbox) -> AgentCommand:
        """Of a task that `add` gave back."""
        if task.command is not None:
            return AgentCommand(command=task.command)
        assert task.sandbox.recipe is not None, "the task was not added"
        recipe = self._recipes[task.sandbox.recipe]
        base_url, workdir = sandbox.reachable(opened.base_url), sandbox.folder
        session = session_id(opened.id)
        if not sandbox.shares_files:
            values = self._values(task, base_url, opened.api_key, HOME_INSIDE, workdir, session)
            launch = make_launch(recipe, values)
            return replace(launch, command=(starter(recipe), *launch.command))
        own = self._home(opened)
        home = str(own / "home") if recipe.home else str(Path.home())
        changed = local_environ(
            recipe,
            os.environ,
            search_path=self._installed[recipe.id].search_path,
            temp=str(own / "tmp"),
        )
        values = self._values(task, base_url, opened.api_key, home, workdir, session)
        launch = make_launch(recipe, values, environ=changed)
        for path, text in launch.files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open_private(Path(path), "wb") as file:
                file.write(text.encode())
        return AgentCommand(command=launch.command, environ=launch.environ)

    def close(self) -> None:
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        self._root = None

    def _values(
        self, task: Task, base_url: str, api_key: str, home: str, workdir: str, session: str
    ) -> LaunchValues:
        return LaunchValues(
            prompt=task.prompt or "",
            model=self._model,
            base_url=base_url,
            api_key=api_key,
            home=home,
            workdir=workdir,
            session_id=session,
        )

    def _home(self, opened: Rollout) -> Path:
        for home in [home for home, rollout in self._homes.items() if rollout.is_left]:
            shutil.rmtree(home, ignore_errors=True)
            del self._homes[home]
        if self._root is None:
            # Short: a socket's path may have 108 bytes.
            self._root = Path(tempfile.mkdtemp(prefix="tracegrad-home-"))
        home = Path(tempfile.mkdtemp(prefix="", dir=self._root))
        self._homes[home] = opened
        for folder in ("home", "tmp"):
            (home / folder).mkdir(mode=0o700)
        return home


def check_programs(recipe: Recipe, installed: InstalledAgent) -> None:
    """Raises RecipeError."""
    path = os.pathsep.join([*installed.search_path, os.environ.get("PATH", os.defpath)])
    for program in recipe.needs:
        if shutil.which(program, path=path) is None:
            raise RecipeError(f"{recipe.name}: needs {program}, which is not here; install it")
    if shutil.which(recipe.command[0], path=path) is None:
        raise RecipeError(
            f"{recipe.path or recipe.name}: command: there is no program {recipe.command[0]!r};"
            " install it, or name what installs it in packages or shell"
        )
