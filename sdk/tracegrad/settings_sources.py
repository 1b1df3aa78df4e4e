"""Settings from arguments, then the environment, then a TOML file, and errors that name the field.

pydantic-settings' own TOML source passes over a file that was named and is not there, fails with a
KeyError where the file has not the table, and does not name a file that is no TOML.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
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


def problems(error: ValidationError) -> dict[str, str]:
    """What is wrong, by the field's name; a check of the whole names its fields itself."""
    return {
        ".".join(map(str, one["loc"])): one["msg"].removeprefix("Value error, ")
        for one in error.errors()
    }
