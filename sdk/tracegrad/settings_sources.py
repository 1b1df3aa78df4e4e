"""Settings from arguments, then the environment, then a TOML file, and errors that name the field.

pydantic-settings' own TOML source passes over a file that was named and is not there, fails with a
KeyError where the file has not the table, and does not name a file that is no TOML.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

SETTINGS_FILE = Path("tracegrad.toml")


class SettingsError(ValueError):
    """One line a wrong setting: its name, what is wrong, what was given."""


class FileSettings(BaseSettings):
    @classmethod
    def file_values(cls) -> Mapping[str, Any]:
        """What the settings file holds of these settings. Raises SettingsError."""
        return {}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = InitSettingsSource(settings_cls, dict(cls.file_values()))
        return init_settings, env_settings, file


def read_toml(path: Path | None = None) -> dict[str, Any]:
    """A settings file; without a path tracegrad.toml of the working directory, if it is there.

    Raises SettingsError.
    """
    named, path = path is not None, path or SETTINGS_FILE
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not named:
            return {}
        raise SettingsError(f"{path}: there is no such settings file") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: this is no text in UTF-8, and so no TOML") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: {error}") from None


def problems(
    error: ValidationError,
    settings: type[BaseModel] | None = None,
    synonyms: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """What is wrong, by the field's name; a check of the whole names its fields itself.

    For a name that `settings` lacks: the one that was meant, as far as it can be told. `synonyms`:
    what others call a setting, and its name here.
    """
    return {
        (name := ".".join(map(str, one["loc"]))): (
            _unknown(name, settings, synonyms)
            if one["type"] == "extra_forbidden" and settings is not None
            else one["msg"].removeprefix("Value error, ")
        )
        + _from_environment(one, settings)
        for one in error.errors()
    }


def _from_environment(error: ErrorDetails, settings: type[BaseModel] | None) -> str:
    """Which variable has the value, as it was given: the file and the flags may be looked through
    in vain. Nothing of a value within JSON."""
    if settings is None or not issubclass(settings, BaseSettings):
        return ""
    given = {name.upper(): value for name, value in os.environ.items()}
    for variable in _variables_of(settings, [str(part) for part in error["loc"]]):
        if given.get(variable) == str(error["input"]):
            return f" (given by {variable})"
    return ""


def _variables_of(settings: type[BaseSettings], path: Sequence[str]) -> Iterator[str]:
    """What sets the value at `path`; a table may be settings with variables of their own."""
    if not path or path[0] not in settings.model_fields:
        return
    field, *rest = path
    for name in _variables(settings)[field]:
        yield "__".join((name, *map(str.upper, rest)))
    table = settings.model_fields[field].annotation
    if isinstance(table, type) and issubclass(table, BaseSettings):
        yield from _variables_of(table, rest)


def _variables(settings: type[BaseSettings]) -> dict[str, list[str]]:
    """By a field's name the variables that set it."""
    prefix = str(settings.model_config.get("env_prefix", ""))
    found = {}
    for name, field in settings.model_fields.items():
        alias = field.validation_alias
        others = alias.choices if isinstance(alias, AliasChoices) else [alias]
        found[name] = [f"{prefix}{name.upper()}", *(str(each).upper() for each in others if each)]
    return found


def _unknown(name: str, settings: type[BaseModel], synonyms: Mapping[str, str]) -> str:
    meant = meant_setting(name, setting_names(settings), synonyms)
    return "there is no such setting" + (f"; did you mean {meant}?" if meant else "")


def unknown_settings(
    values: Mapping[str, Any],
    settings: type[BaseModel],
    synonyms: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Of nested `values` the names that `settings` lacks, and what `problems` says of them: for a
    check before any of the values is used."""
    known = set(setting_names(settings))
    tables = {name.rpartition(".")[0] for name in known}
    return {
        name: _unknown(name, settings, synonyms)
        for name in _names(values, tables)
        if name not in known
    }


def unknown_variables(
    settings: type[BaseSettings], environ: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """A line for each variable of the environment that has the prefix of these settings and names
    none of them. They are passed over, and not refused: a variable of another version, or one that
    is meant for another program, must not keep this one from starting."""
    prefix = str(settings.model_config.get("env_prefix", ""))
    known = {variable for names in _variables(settings).values() for variable in names}
    for variable in sorted(environ):
        top = variable.upper().partition("__")[0]
        if variable.upper().startswith(prefix) and top not in known:
            own = f"TRACEGRAD_{top.removeprefix(prefix)}"
            rests = {name.removeprefix(prefix): name for name in known}  # all begin alike
            close = [
                rests[rest] for rest in get_close_matches(top.removeprefix(prefix), rests, n=1)
            ]
            meant = own if own in known else next(iter(close), "")
            meant = f"; did you mean {meant}?" if meant else ""
            yield f"{variable}: there is no such setting{meant}"


def _names(values: Mapping[str, Any], tables: set[str], table: str = "") -> Iterator[str]:
    for key, value in values.items():
        name = f"{table}{key}"
        yield name
        if isinstance(value, Mapping) and name in tables:
            yield from _names(value, tables, f"{name}.")


def setting_names(settings: type[BaseModel], table: str = "") -> Iterator[str]:
    """`optim.lr` and all others, the names of tables too."""
    for name, field in settings.model_fields.items():
        yield f"{table}{name}"
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from setting_names(kind, f"{table}{name}.")


def meant_setting(
    name: str, known: Iterable[str], synonyms: Mapping[str, str] = MappingProxyType({})
) -> str | None:
    """The known name that `name` is most likely a slip for: one of another table, or by spelling;
    those of its own table first."""
    table, _, leaf = name.rpartition(".")
    if leaf in synonyms:
        return synonyms[leaf]
    every = list(known)
    if elsewhere := [each for each in every if each.rpartition(".")[2] == leaf]:
        return elsewhere[0]
    siblings = [each for each in every if each.rpartition(".")[0] == table]
    for among in (siblings, every):
        by_leaf = {each.rpartition(".")[2]: each for each in reversed(among)}
        if close := get_close_matches(leaf, by_leaf, n=1):
            return by_leaf[close[0]]
    return None
