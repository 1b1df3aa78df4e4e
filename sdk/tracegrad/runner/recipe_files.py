"""Recipes from their files: those that are shipped, and a user's own."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from tracegrad.frameworks import Trap
from tracegrad.runner.recipe import SHIPPED, Dialect, Installer, Recipe

OWN = Path(".tracegrad/recipes")
PLACEHOLDERS = (
    "prompt", "model", "base_url", "root_url", "api_key", "home", "workdir", "session_id",
)  # fmt: skip

_WORD = re.compile(r"(?<!\$)\{([a-z_]+)\}")
_NAME, _VERSION = r"[a-z0-9][a-z0-9._-]*", r"[A-Za-z0-9][A-Za-z0-9._+-]*"


class RecipeError(ValueError):
    """One line: file, field, what is wrong, the fix."""


@dataclass(frozen=True, slots=True)
class _Field:
    """`what`: to write there. `read` raises ValueError with what is wrong."""

    what: str
    read: Callable[[Any], Any]
    required: bool = False


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.60} is no text")
    return value


def _matching(pattern: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if re.fullmatch(pattern, _text(value)) is None:
            raise ValueError(f"{value!r:.60} cannot be one")
        return str(value)

    return read


def _one_of(kind: Any) -> Callable[[Any], str]:
    return _matching("|".join(get_args(kind)))


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"{value!r:.60} is no list of texts")
    return tuple(value)


def _texts(value: Any) -> dict[str, str]:
    """A table within becomes JSON."""
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.60} is no table")
    for name, text in value.items():
        if not isinstance(text, str | dict):
            raise ValueError(f"{name} = {text!r:.60} is no text")
    return {
        name: text if isinstance(text, str) else json.dumps(text) for name, text in value.items()
    }


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r:.60} is neither")
    return value


def _traps(value: Any) -> tuple[Trap, ...]:
    traps = value if isinstance(value, list) else [value]
    for trap in traps:
        if not isinstance(trap, dict) or set(trap) != {"what", "remedy"}:
            raise ValueError(f"{trap!r:.60} has not both, or something else")
    return tuple(Trap(_text(trap["what"]), _text(trap["remedy"])) for trap in traps)


_NAMES = ", ".join(f'"{name}"' for name in get_args(Dialect))
_INSTALLERS = ", ".join(f'"{name}"' for name in get_args(Installer))
_FIELDS = {
    "name": _Field('small letters, digits, "-", "_", "."', _matching(_NAME), required=True),
    "version": _Field('the agent\'s, such as "1.2.3"', _matching(_VERSION), required=True),
    "dialect": _Field(f"one of {_NAMES}", _one_of(Dialect), required=True),
    "about": _Field("whose it is, in a line", _text),
    "installer": _Field(f"one of {_INSTALLERS}", _one_of(Installer), required=True),
    "packages": _Field('a list, such as ["agent=={version}"]', _words),
    "lock": _Field("npm's folder with package-lock.json, or requirements with hashes", _text),
    "shell": _Field("a list of lines for the shell", _words),
    "command": _Field('a list of words, such as ["agent", "{prompt}"]', _words, required=True),
    "environ": _Field('variables, such as URL = "{base_url}"; a table becomes JSON', _texts),
    "inherit": _Field("a list of variables' names", _words),
    "files": _Field("texts by their path; a table becomes JSON", _texts),
    "home": _Field("true or false", _truth),
    "needs": _Field('a list of programs, such as ["bash", "git"]', _words),
    "traps": _Field("[[traps]] tables, each with `what` and `remedy`", _traps),
}


def load_recipe(path: Path, version: str | None = None) -> Recipe:
    """The recipe in `path`, at another `version` where one is given. Raises RecipeError."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}; name a recipe's file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path}: no TOML: {error}") from None
    values = _values(given, f"{path}: ")
    if version is not None and version != values["version"]:
        # The lock pins the version that the file names.
        values = {**values, "version": version, "lock": None}
    for name in ("packages", "shell"):
        words = values.get(name, ())
        values[name] = tuple(each.replace("{version}", values["version"]) for each in words)
    if values.get("lock") is not None:
        values["lock"] = path.parent / values["lock"]
    recipe = Recipe(**values, path=path)
    _check(recipe, f"{path}: ")
    return recipe


def _values(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Raises RecipeError."""
    found: dict[str, Any] = {}
    for name in given:
        if name not in _FIELDS:
            close = get_close_matches(name, _FIELDS, n=1)
            fix = f"did you mean {close[0]}?" if close else f"there are {', '.join(_FIELDS)}"
            raise RecipeError(f"{where}{name}: there is no such field; {fix}")
    for name, field in _FIELDS.items():
        if name in given:
            try:
                found[name] = field.read(given[name])
            except ValueError as error:
                raise RecipeError(f"{where}{name}: {error}; write {field.what}") from None
        elif field.required:
            raise RecipeError(f"{where}{name}: it is missing; write {field.what}")
    return found


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
    if not recipe.command:
        raise RecipeError(f"{where}command: it is empty; write {_FIELDS['command'].what}")
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
    if version and re.fullmatch(_VERSION, version) is None:
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
