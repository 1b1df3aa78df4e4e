"""Settings of the proxy: flags, then environment, then the table `[proxy]` of `tracegrad.toml`.

A wrong setting fails at start with its name; nothing is guessed.
"""

from __future__ import annotations

import ipaddress
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, SecretStr, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

DEFAULT_STORE = "sqlite:///.tracegrad/store.db"
SETTINGS_FILE = Path("tracegrad.toml")


class ProxySettings(BaseSettings):
    """What `tracegrad proxy` needs to know.

    Environment: `TRACEGRAD_STORE`, and `TRACEGRAD_PROXY_<NAME>` for the rest.

    Raises `pydantic.ValidationError` (a ValueError) that names each wrong field.
    """

    model_config = SettingsConfigDict(
        env_prefix="TRACEGRAD_PROXY_", extra="forbid", populate_by_name=True
    )

    upstream: str = Field("http://127.0.0.1:8000", description="the engine's base URL")
    upstream_api_key: SecretStr | None = Field(
        None, description="sent to the engine in place of the client's key"
    )
    store: str = Field(
        DEFAULT_STORE,
        # Not "store" itself, which would also be a variable STORE of somebody else's.
        validation_alias=AliasChoices("TRACEGRAD_STORE", "TRACEGRAD_PROXY_STORE"),
        description="SQLAlchemy URL of the store",
    )
    model: str | None = Field(
        None,
        description="the engine's model for every call, whatever name the agent gives;"
        " without it names are passed on",
    )
    host: str = Field("127.0.0.1", description="loopback address to listen on")
    port: int = Field(4141, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    held: bool = Field(
        False,
        description="calls wait until the first weight push; for an engine that starts with other"
        " weights than those of the store's current version",
    )
    max_body_mib: int = Field(64, ge=1, description="largest request body, in MiB")
    cache_mib: int = Field(256, ge=1, description="memory for recent turns, in MiB")

    @field_validator("upstream")
    @classmethod
    def _upstream_is_a_base_url(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http(s) URL: {value!r}; give one like http://127.0.0.1:8000")
        # People paste the base URL of their OpenAI client, which ends in /v1.
        return value.rstrip("/").removesuffix("/v1").rstrip("/")

    @field_validator("host")
    @classmethod
    def _host_is_loopback(cls, value: str) -> str:
        if value == "localhost":
            return value
        try:
            loopback = ipaddress.ip_address(value).is_loopback
        except ValueError:
            raise ValueError(f"not an IP address or 'localhost': {value!r}") from None
        if not loopback:
            raise ValueError(
                f"{value} is not a loopback address, and this version has no admin keys yet: "
                "anyone who reaches the port could read and write rollouts; use 127.0.0.1"
            )
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        table = InitSettingsSource(settings_cls, _toml_table("proxy"))
        return init_settings, env_settings, table


def _toml_table(name: str) -> dict[str, Any]:
    """The table `name` of the settings file in the working directory, or nothing."""
    try:
        content = tomllib.loads(SETTINGS_FILE.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{SETTINGS_FILE}: {error}") from None
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"{SETTINGS_FILE}: [{name}] is not a table")
    return table
