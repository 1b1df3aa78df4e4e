"""Recipes from their files: those that are shipped, and a user's own."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tracegrad.runner.recipe import SHIPPED, Dialect, Installer, Recipe, Trap

OWN = Path(".tracegrad/recipes")
PLACEHOLDERS = (
    "prompt", "model", "base_url", "root_url", "api_key", "home", "workdir", "session_id",
)  # fmt: skip

_WORD = re.compile(r"(?<!\$)\{([a-z_]+)\}")
_NAME, _VERSION = r"^[a-z0-9][a-z0-9._-]*$", r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"


class RecipeError(ValueError):
    """One line: file, field, what is wrong, the fix."""


class _TrapTable(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    what: str = Field(description="what goes wrong, in a sentence")
    remedy: str = Field(description="what is done about it, in a sentence")


_Words = Annotated[tuple[str, ...], Field(strict=False)]


class _RecipeTable(BaseModel):
    """What a file may say. A field's description is what to write there."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(
        pattern=_NAME, description='the name for --agent: small letters, digits, "-", "_" and "."'
    )
    version: str = Field(pattern=_VERSION, description='the agent\'s version, such as "1.2.3"')
    dialect: Dialect = Field(
        description='"chat", "completions", "responses", "messages" or "gemini"'
    )
    about: str = Field("", description="whose it is, in a line")
    installer: Installer = Field(description='"npm", "pip", "apt", "shell" or "none"')
    packages: _Words = Field((), description='a list, such as ["agent=={version}"]')
    lock: str | None = Field(
        None, description="npm's folder with package-lock.json, or a requirements file with hashes"
    )
    shell: _Words = Field((), description="a list of lines for the shell")
    command: _Words = Field(
        min_length=1, description='a list of words, such as ["agent", "{prompt}"]'
    )
    environ: Mapping[str, str | dict[str, Any]] = Field(
        default_factory=dict, description="texts in quotes; a table becomes JSON"
    )
    inherit: _Words = Field((), description="a list of the variables' names")
    files: Mapping[str, str | dict[str, Any]] = Field(
        default_factory=dict, description="texts in quotes; a table becomes JSON"
    )
    home: bool = Field(True, description="true or false")
    needs: _Words = Field((), description='a list of programs, such as ["bash", "git"]')
    traps: list[_TrapTable] = Field(
        default_factory=list, description="[[traps]] tables, each with `what` and `remedy`"
    )


def load_recipe(path: Path, version: str | None = None) -> Recipe:
    """The recipe in `path`, at another `version` where one is given. Raises RecipeError."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}; name a recipe's file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path}: no TOML: {error}") from None
    try:
        table = _RecipeTable.model_validate(given)
    except ValidationError as error:
        raise RecipeError(f"{path}: {_problem(error)}") from None
    recipe = _recipe(table, path, version)
    _check(recipe, f"{path}: ")
    return recipe


def _recipe(table: _RecipeTable, path: Path, version: str | None) -> Recipe:
    other = version is not None and version != table.version
    version = table.version if version is None else version
    return Recipe(
        name=table.name,
        version=version,
        dialect=table.dialect,
        about=table.about,
        installer=table.installer,
        packages=tuple(each.replace("{version}", version) for each in table.packages),
        # It pins the version that the file names.
        lock=None if table.lock is None or other else path.parent / table.lock,
        shell=tuple(each.replace("{version}", version) for each in table.shell),
        command=table.command,
        environ=_texts(table.environ),
        inherit=table.inherit,
        files=_texts(table.files),
        home=table.home,
        needs=table.needs,
        traps=tuple(Trap(each.what, each.remedy) for each in table.traps),
        path=path,
    )


def _texts(values: Mapping[str, str | dict[str, Any]]) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
    }


def _problem(error: ValidationError) -> str:
    """Of the first one: `field: what is wrong; the fix`."""
    one = error.errors()[0]
    # A union's branches are the last parts of a place; they say nothing to a user.
    place = [str(part) for part in one["loc"] if part not in ("str", "dict[str,any]")]
    name = ".".join(place)
    if one["type"] == "extra_forbidden":
        known = [*(_TrapTable if place[0] == "traps" else _RecipeTable).model_fields]
        close = get_close_matches(place[-1], known, n=1)
        fix = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        return f"{name}: there is no such field; {fix}"
    fields = _RecipeTable.model_fields
    if place[0] == "traps" and len(place) > 2 and place[-1] in _TrapTable.model_fields:
        fields = _TrapTable.model_fields
    wanted = fields[place[-1] if place[-1] in fields else place[0]].description
    problem = "it is missing" if one["type"] == "missing" else one["msg"].lower()
    return f"{name}: {problem}; write {wanted}"


def _check(recipe: Recipe, where: str) -> None:
    """What no field says alone. Raises RecipeError."""
    texts = {
        **{f"command.{number}": word for number, word in enumerate(recipe.command)},
        **{f"environ.{name}": text for name, text in recipe.environ.items()},
        **{f"files.{name}": text for name, text in recipe.files.items()},
    }
    for field, text in texts.items():
        for word in _WORD.findall(text):
            close = get_close_matches(word, PLACEHOLDERS, n=1, cutoff=0.75)
            if close and word != close[0]:
                raise RecipeError(f"{where}{field}: {{{word}}} stands for nothing; "
                                  f"did you mean {{{close[0]}}}?")  # fmt: skip
    if not any("{prompt}" in text for text in texts.values()):
        raise RecipeError(f"{where}command: the agent would not hear its task; put {{prompt}} in"
                          " a word of it, or in environ or files")  # fmt: skip
    wanted = {"npm": recipe.packages, "pip": recipe.packages, "apt": recipe.packages,
              "shell": recipe.shell, "none": True}[recipe.installer]  # fmt: skip
    if not wanted:
        field = "shell" if recipe.installer == "shell" else "packages"
        raise RecipeError(f"{where}{field}: {recipe.installer} has nothing to install; name it"
                          ' there, or write installer = "none"')  # fmt: skip
    if not recipe.home and any(not path.startswith("/") for path in recipe.files):
        raise RecipeError(f"{where}files: without a home of the attempt's they would go into yours;"
                          " write home = true, or absolute paths")  # fmt: skip
    if recipe.installer in ("none", "shell", "apt") and recipe.lock is not None:
        raise RecipeError(f"{where}lock: {recipe.installer} reads none; leave it out")
    if recipe.lock is not None and not recipe.lock.exists():
        raise RecipeError(f"{where}lock: {recipe.lock} is not there; its path is relative to the"
                          " recipe's file")  # fmt: skip


def recipe_paths(own: Path = OWN) -> Mapping[str, Path]:
    """Every recipe's file by its name; the user's own go before those that are shipped."""
    found = [*_toml_files(SHIPPED), *_toml_files(own)]
    return {path.stem: path for path in found}


def _toml_files(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from sorted(folder.glob("*.toml"))


def find_recipe(agent: str, own: Path = OWN) -> Recipe:
    """By name, `name@version`, or the path of a file. Raises RecipeError."""
    if is_path(agent):
        return load_recipe(Path(agent))
    name, _, version = agent.partition("@")
    if version and re.match(_VERSION, version) is None:
        raise RecipeError(f"{agent}: {version!r} is no version; write NAME@VERSION")
    paths = recipe_paths(own)
    if name not in paths:
        raise RecipeError(_unknown(name, [*paths]))
    recipe = load_recipe(paths[name], version or None)
    if recipe.name != name:
        raise RecipeError(
            f'{paths[name]}: name: {recipe.name!r} is not the file\'s; write "{name}"'
        )
    return recipe


def is_path(agent: str) -> bool:
    return "/" in agent or agent.endswith(".toml")


def is_recipe(agent: str, own: Path = OWN) -> bool:
    """Whether there is one of that name, or it is a path."""
    return is_path(agent) or agent.partition("@")[0] in recipe_paths(own)


def _unknown(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1)
    fix = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))};"
    return f"{name}: there is no recipe of that name; {fix} your own go to {OWN}/{name}.toml"
