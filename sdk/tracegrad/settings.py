"""Settings of the proxy: flags, then environment, then the table `[proxy]` of `tracegrad.toml`.

A wrong setting fails at start with its name; nothing is guessed.
"""

from __future__ import annotations

import ipaddress
import json
import re
import tomllib
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

DEFAULT_STORE = "sqlite:///.tracegrad/store.db"
SETTINGS_FILE = Path("tracegrad.toml")
ADMIN_KEY_LENGTH = 16

_visible = re.compile(r"[!-~]+")
_hook = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
# Variables that are not TRACEGRAD_PROXY_<NAME>.
_VARIABLES = {"store": "TRACEGRAD_STORE", "admin_key": "TRACEGRAD_API_KEY"}


class ProxySettings(BaseSettings):
    """What `tracegrad proxy` needs to know.

    Environment: `TRACEGRAD_STORE`, `TRACEGRAD_API_KEY`, and `TRACEGRAD_PROXY_<NAME>` for the rest.

    Raises `pydantic.ValidationError` (a ValueError) that names each wrong field.
    """

    model_config = SettingsConfigDict(
        env_prefix="TRACEGRAD_PROXY_",
        extra="forbid",
        populate_by_name=True,
        # Errors name the field, whatever variable it came from, and never show a key.
        loc_by_alias=False,
        hide_input_in_errors=True,
    )

    # The engine

    upstream: str = Field(
        "http://127.0.0.1:8000",
        description="the engine's base URL; of several replicas, all of them as a list or with"
        " commas between",
    )
    upstream_kind: Literal["vllm", "openai", "litellm"] = Field(
        "vllm",
        description="what the engine is: vllm gives tokens; openai (any compatible server) and"
        " litellm (any provider, by its model names) give text alone, for traces to learn from",
    )
    upstream_api_key: SecretStr | None = Field(
        None, exclude=True, description="sent to the engine in place of the client's key"
    )
    model: str | None = Field(
        None,
        description="the engine's model for every call, whatever name the agent gives;"
        " without it names are passed on",
    )
    tokenizer: Path | None = Field(
        None,
        description="folder of the engine's tokenizer and chat template, for exact continuation;"
        " without it the one that the engine says it serves, where that is a folder here",
    )
    sampling: Literal["as_asked", "free"] = Field(
        "as_asked",
        description="free: temperature 1 and nothing that bends the distribution (top_p, top_k,"
        " min_p, penalties, logit_bias, strict tools), whatever the agent asks for, so that its"
        " turns can be trained",
    )
    routed_experts: bool = Field(
        False,
        description="the engine tells which experts it chose (vLLM with"
        " --enable-return-routed-experts), which it does only in answers of one piece: a call that"
        " asks for one is not streamed from the engine while weights are pushed; when a push falls"
        " into it all the same, its turn is not trained",
    )
    read_timeout_s: float = Field(
        600, gt=0, description="silence of the engine's, in seconds, that ends a call"
    )
    max_waiting: int = Field(
        4096,
        ge=0,
        description="calls that may wait while weights are pushed or the engine restarts; more"
        " are answered with 503 and when to come back",
    )
    max_wait_s: float = Field(
        900, gt=0, description="seconds that a call waits for the engine before it gets a 503"
    )
    held: bool = Field(
        False,
        description="calls wait until the first weight push; for an engine that starts with other"
        " weights than those of the store's current version",
    )

    # What is kept

    store: str = Field(
        DEFAULT_STORE,
        # Not "store" itself, which would also be a variable STORE of somebody else's.
        validation_alias=AliasChoices(_VARIABLES["store"], "TRACEGRAD_PROXY_STORE"),
        description="SQLAlchemy URL of the store",
    )
    redact: list[str] = Field(
        [],
        description="functions, as module:function, that take out of every record what must not"
        " be stored, such as tracegrad.proxy.redaction:secrets; token ids are stored as they are",
    )
    keep_text: bool = Field(
        True,
        description="requests, responses and the texts of spans are stored; without them there are"
        " tokens, and previous_response_id and repeats of answered calls do not work",
    )
    cache_mib: int = Field(256, ge=1, description="memory for recent turns, in MiB")

    # Who may reach it

    admin_key: SecretStr | None = Field(
        None,
        exclude=True,
        validation_alias=AliasChoices(_VARIABLES["admin_key"], "TRACEGRAD_PROXY_ADMIN_KEY"),
        description=f"key, of {ADMIN_KEY_LENGTH} characters or more, that may do everything and"
        " mints the keys of rollouts; without it anyone on this machine may call",
    )
    host: str = Field(
        "127.0.0.1",
        description="address to listen on; one that is not loopback needs an admin key",
    )
    port: int = Field(4141, ge=0, le=65535, description="port to listen on; 0 takes a free one")

    # What a client may take up

    max_connections: int = Field(4096, ge=1, description="open connections; more get a 503")
    max_body_mib: int = Field(64, ge=1, description="largest request body, in MiB")
    max_head_kib: int = Field(
        64, ge=1, le=1024, description="request line and headers together, in KiB"
    )
    max_headers: int = Field(128, ge=1, description="header fields of a request")
    head_timeout_s: float = Field(
        15, gt=0, description="seconds in which a request's headers must have arrived"
    )
    body_timeout_s: float = Field(
        30, gt=0, description="seconds without a byte after which a request body is given up"
    )
    send_timeout_s: float = Field(
        300,
        gt=0,
        description="seconds in which a client takes nothing of its answer before it is dropped",
    )
    idle_timeout_s: int = Field(
        75, ge=1, description="seconds that a connection is kept open between requests"
    )

    @property
    def upstreams(self) -> tuple[str, ...]:
        """The base URL of every replica, without the /v1 that people paste along with it."""
        return tuple(map(_without_v1, self.upstream.split(",")))

    def environment(self) -> dict[str, str]:
        """Variables that give another process these settings; the keys stand there in the clear."""
        given = self.model_dump(mode="json", exclude_none=True, exclude={"store"})
        found = {
            f"TRACEGRAD_PROXY_{name.upper()}": v if isinstance(v, str) else json.dumps(v)
            for name, v in given.items()
        }
        found[_VARIABLES["store"]] = self.store
        if self.upstream_api_key is not None:
            found["TRACEGRAD_PROXY_UPSTREAM_API_KEY"] = self.upstream_api_key.get_secret_value()
        if self.admin_key is not None:
            found[_VARIABLES["admin_key"]] = self.admin_key.get_secret_value()
        return found

    @field_validator("upstream", mode="before")
    @classmethod
    def _upstream_may_be_a_list(cls, value: Any) -> Any:
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("upstream")
    @classmethod
    def _upstreams_are_base_urls(cls, value: str) -> str:
        urls = [_base_url(part.strip()) for part in value.split(",")]
        if len(set(map(_without_v1, urls))) < len(urls):
            raise ValueError("the same URL stands there twice; name each replica once")
        return ",".join(urls)

    @field_validator("redact")
    @classmethod
    def _hooks_are_named(cls, value: list[str]) -> list[str]:
        for name in value:
            if _hook.fullmatch(name) is None:
                raise ValueError(f"{name!r} is not of the form module:function")
        return value

    @field_validator("admin_key")
    @classmethod
    def _admin_key_is_long(cls, value: SecretStr | None) -> SecretStr | None:
        key = value.get_secret_value() if value is not None else None
        if key is None:
            return None
        if _visible.fullmatch(key) is None:
            raise ValueError(
                "it must be of visible ASCII characters alone, to travel in a header; make one"
                " with: openssl rand -hex 32"
            )
        if key.startswith("tg-"):
            raise ValueError(
                "keys that begin with tg- belong to rollouts; make another with: openssl rand"
                " -hex 32"
            )
        if len(key) < ADMIN_KEY_LENGTH:
            raise ValueError(
                f"it has {len(key)} characters, and at least {ADMIN_KEY_LENGTH} are needed; make"
                " one with: openssl rand -hex 32"
            )
        return value

    @field_validator("host")
    @classmethod
    def _host_is_loopback_or_guarded(cls, value: str, info: ValidationInfo) -> str:
        if value == "localhost":
            return value
        try:
            loopback = ipaddress.ip_address(value).is_loopback
        except ValueError:
            raise ValueError(f"not an IP address or 'localhost': {value!r}") from None
        # An admin key that was given and is wrong is not in info.data; that is an error already.
        if not loopback and info.data.get("admin_key", value) is None:
            raise ValueError(
                f"{value} is not a loopback address, and there is no admin key: anyone who"
                " reaches the port could read and write rollouts. Set TRACEGRAD_API_KEY (make one"
                " with: openssl rand -hex 32), or use 127.0.0.1"
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


def _base_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an http(s) URL: {value!r}; give one like http://127.0.0.1:8000")
    return value.rstrip("/")


def _without_v1(url: str) -> str:
    return url.removesuffix("/v1").rstrip("/")


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
