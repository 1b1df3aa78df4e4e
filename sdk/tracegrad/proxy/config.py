"""Settings of the proxy: flags, then environment, then the table `[proxy]` of `tracegrad.toml`.

A wrong setting fails at start with its name; nothing is guessed.
"""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, Secret, SecretStr, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from tracegrad.chat.sampling_params import EngineGrammar
from tracegrad.log_format import LogFormat
from tracegrad.protocol import API_KEY_PREFIX
from tracegrad.settings_sources import SETTINGS_FILE, FileSettings, SettingsError, read_toml
from tracegrad.store.anchors.schedule import AnchorSettings
from tracegrad.urls import LONGEST_SOCKET_PATH, STORE_VARIABLE, masked, unix_socket, unmasked

DEFAULT_STORE = "sqlite:///.tracegrad/store.db"
ADMIN_KEY_LENGTH = 16

_visible = re.compile(r"[!-~]+")
_hook = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_origin = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?)(:[0-9]{1,5})?")
_host = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
# Variables that are not TRACEGRAD_PROXY_<NAME>.
_VARIABLES = {"store": STORE_VARIABLE, "admin_key": "TRACEGRAD_API_KEY"}


class SecretUrl(Secret[str]):
    """A URL that may hold a password: it is shown, and dumped as JSON, without."""

    def _display(self) -> str:
        return masked(self.get_secret_value())


class ProxySettings(FileSettings):
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
        description="the engine's base URL, or unix:///PATH of its socket; of several replicas, all"
        " of them as a list or with commas between",
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
        description="folder of the engine's tokenizer and chat template, or the model's name on the"
        " Hugging Face Hub, for exact continuation; without it the one that the engine says it"
        " serves, where that is a folder here or in the Hub's cache",
    )
    chat_template: Path | None = Field(
        None,
        description="file of the chat template that the engine was started with (--chat-template),"
        " in place of the model's own",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="arguments of the chat template that the engine was started with"
        " (--default-chat-template-kwargs)",
    )
    sampling: Literal["as_asked", "free"] = Field(
        "as_asked",
        description="free: temperature 1 and nothing that bends the distribution (top_p, top_k,"
        " min_p, penalties, logit_bias, strict tools, tool_choice required,"
        " parallel_tool_calls false), whatever the agent asks for, so that its turns can be"
        " trained",
    )
    engine_grammar: EngineGrammar = Field(
        "asked",
        description="which calls the engine samples by a grammar: asked, those that ask for one;"
        " tools, also those that have tools; chat, all chat calls. Their turns are kept as"
        " constrained; see docs/agents.md",
    )
    routed_experts: bool = Field(
        False,
        description="the engine reports which experts it chose (vLLM with"
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
    pace_calls: bool = Field(
        False,
        description="the first call of a rollout that training selects waits while the trainer has"
        " no room for more (data.in_flight, data.synchronous, batches.stale = wait), for"
        " max_wait_s at most; then, as everything else, it is let in",
    )
    held: bool = Field(
        False,
        description="calls wait until a first weight push has set a version; for an engine that"
        " starts with other weights than those of the store's current version",
    )

    # What is kept

    store: SecretUrl = Field(
        SecretUrl(DEFAULT_STORE),
        # Not "store" itself, which would also be a variable STORE of somebody else's.
        validation_alias=AliasChoices(_VARIABLES["store"], "TRACEGRAD_PROXY_STORE"),
        description="SQLAlchemy URL of the store",
    )
    redact: list[str] = Field(
        [],
        description="functions, as module:function, that take out of every record what must not"
        " be stored, such as tracegrad.proxy.capture.redaction:secrets; token ids are stored as"
        " they are",
    )
    keep_text: bool = Field(
        True,
        description="requests, responses and the texts of spans are stored; without them there are"
        " tokens, and previous_response_id and repeats of answered calls do not work",
    )
    anchors: AnchorSettings | None = Field(
        None,
        description="rollouts that begin behind an expert's turns, for POST /api/anchors/next;"
        " a table of its own, [proxy.anchors]",
    )
    cache_mib: int = Field(
        256,
        ge=1,
        description="memory for recent turns, in MiB; below 100 fewer calls are remembered too"
        " (their ids for spans and feedback, their answers for retries), 500 a MiB, and below 250"
        " fewer rollouts, 200 a MiB",
    )

    # Who may reach it

    admin_key: SecretStr | None = Field(
        None,
        exclude=True,
        validation_alias=AliasChoices(_VARIABLES["admin_key"], "TRACEGRAD_PROXY_ADMIN_KEY"),
        description=f"key, of {ADMIN_KEY_LENGTH} characters or more, that may do everything and"
        " mints the keys of rollouts; without it anyone on this machine may call",
    )
    control_key: SecretStr | None = Field(
        None,
        exclude=True,
        description=f"key, of {ADMIN_KEY_LENGTH} characters or more, that a trainer pushes weights"
        " with (/api/push/...), and nothing else; `trainer serve` makes one at each start. Without"
        " it that takes the admin key",
    )
    metrics_key: SecretStr | None = Field(
        None,
        exclude=True,
        description=f"key, of {ADMIN_KEY_LENGTH} characters or more, that reads /metrics, and"
        " nothing else; without it that takes the admin key, where there is one",
    )
    host: str = Field(
        "127.0.0.1",
        description="address to listen on; one that is not loopback needs an admin key",
    )
    port: int = Field(4141, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    allowed_hosts: list[str] = Field(
        [],
        description="names and addresses, beside loopback ones, under which a proxy without an"
        " admin key is asked for, such as host.docker.internal; other names may be a web page's",
    )

    feedback_origins: list[str] = Field(
        [],
        description="origins of web pages that may post to /api/feedback from a browser, such as"
        " https://app.example, with a key for events of the rollout; see docs/proxy.md",
    )

    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that serve the port together (Linux); each takes its part of"
        " max_connections, max_waiting and max_bodies_mib, and has cache_mib of its own",
    )
    log_format: LogFormat = Field(
        "text",
        description="json: the log, on standard error, is one JSON object a line",
    )

    # What a client may ask of the engine

    pass_unknown_fields: bool = Field(
        False,
        description="fields of a request that are neither its vendor's nor plain sampling settings"
        " reach the engine, whoever sends them; otherwise only with the admin key",
    )
    allowed_media_domains: list[str] = Field(
        [],
        description="host names from which the engine may fetch the images, audio and video that"
        " a request links to; data: URLs need none",
    )

    # What a client may take up

    max_connections: int = Field(4096, ge=1, description="open connections; more get a 503")
    max_body_mib: int = Field(
        32, ge=1, description="largest request body, in MiB; of spans, also after unpacking"
    )
    max_api_body_mib: int = Field(
        8, ge=1, description="largest request body below /api (events), in MiB"
    )
    max_values: int = Field(
        500_000, ge=1, description="JSON values, or fields of OTLP messages, in a request's body"
    )
    max_spans: int = Field(
        5_000, ge=1, description="spans in one export; those beyond are rejected, and counted"
    )
    max_bodies_mib: int = Field(
        1024,
        ge=1,
        description="memory for all request bodies in flight, as received and as objects, in MiB;"
        " half of it for one key, or one address where no key is asked for. A body that finds no"
        " room in ten seconds gets a 503",
    )
    max_head_kib: int = Field(
        64, ge=1, le=1024, description="request line and headers together, in KiB"
    )
    max_headers: int = Field(128, ge=1, description="header fields of a request")
    head_timeout_s: float = Field(
        15, gt=0, description="seconds in which a request's headers must have arrived"
    )
    body_timeout_s: float = Field(
        30,
        gt=0,
        description="seconds over which a request body must come at min_body_kib_s on average;"
        " slower ones are given up",
    )
    min_body_kib_s: float = Field(
        4, gt=0, description="slowest rate of a request body, in KiB a second"
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
        found[_VARIABLES["store"]] = self.store.get_secret_value()
        for name in ("upstream_api_key", "control_key", "metrics_key", "admin_key"):
            secret = getattr(self, name)
            if secret is not None:
                variable = _VARIABLES.get(name, f"TRACEGRAD_PROXY_{name.upper()}")
                found[variable] = secret.get_secret_value()
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

    @field_validator("upstream_kind")
    @classmethod
    def _litellm_has_no_sockets(cls, value: str, info: ValidationInfo) -> str:
        if value == "litellm" and unix_socket(info.data.get("upstream", "")) is not None:
            raise ValueError("litellm cannot reach a Unix socket; give upstream as an http(s) URL")
        return value

    @field_validator("store")
    @classmethod
    def _password_is_known(cls, value: SecretUrl) -> SecretUrl:
        return SecretUrl(unmasked(value.get_secret_value()))

    @field_validator("redact")
    @classmethod
    def _hooks_are_named(cls, value: list[str]) -> list[str]:
        for name in value:
            if _hook.fullmatch(name) is None:
                raise ValueError(f"{name!r} is not of the form module:function")
        return value

    @field_validator("allowed_hosts", "allowed_media_domains")
    @classmethod
    def _hosts_are_names(cls, value: list[str]) -> list[str]:
        names = [name.lower().rstrip(".") for name in value]
        for name in names:
            if _host.fullmatch(name) is None and not _is_address(name):
                raise ValueError(
                    f"{name!r} is not a host name or an address: give no scheme, port or path"
                )
        return names

    @field_validator("feedback_origins")
    @classmethod
    def _origins_are_origins(cls, value: list[str]) -> list[str]:
        origins = [origin.lower() for origin in value]
        for origin in origins:
            if _origin.fullmatch(origin) is None:
                raise ValueError(
                    f"{origin!r} is not an origin: give scheme, host and port as browsers do,"
                    " https://app.example or http://localhost:3000, without a path"
                )
        return origins

    @field_validator("admin_key", "control_key", "metrics_key")
    @classmethod
    def _key_is_long(cls, value: SecretStr | None) -> SecretStr | None:
        key = value.get_secret_value() if value is not None else None
        if key is None:
            return None
        if _visible.fullmatch(key) is None:
            raise ValueError(
                "it must be of visible ASCII characters alone, to travel in a header; make one"
                " with: openssl rand -hex 32"
            )
        if key.startswith(API_KEY_PREFIX):
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
        # An admin key that was given and is wrong is not in info.data; that is an error already.
        problem = unguarded_host(value, has_admin_key=info.data.get("admin_key", value) is not None)
        if problem is not None:
            raise ValueError(problem)
        return value

    @classmethod
    def file_values(cls) -> dict[str, Any]:
        table = read_toml().get("proxy", {})
        if not isinstance(table, dict):
            raise SettingsError(f"{SETTINGS_FILE}: [proxy] is not a table")
        return table


def unguarded_host(host: str, *, has_admin_key: bool) -> str | None:
    """Why a proxy may not listen there; None: it may.

    Raises:
        ValueError: it is no address.
    """
    if host == "localhost":
        return None
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ValueError(f"not an IP address or 'localhost': {host!r}") from None
    if loopback or has_admin_key:
        return None
    return (
        f"{host} is not a loopback address, and there is no admin key: anyone who"
        " reaches the port could read and write rollouts. Set TRACEGRAD_API_KEY (make one"
        " with: openssl rand -hex 32), or use 127.0.0.1"
    )


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def _base_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme == "unix":
        return _socket_url(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"not an http(s) URL: {masked(value)!r}; give one like http://127.0.0.1:8000, or"
            " unix:///PATH of a socket"
        )
    if parts.username is not None or parts.query or parts.fragment:
        # Messages name the engine by its URL, to clients too.
        raise ValueError(
            f"the URL of {parts.hostname} has a user, a password or a query in it; leave them out:"
            " the engine's key is upstream_api_key (TRACEGRAD_PROXY_UPSTREAM_API_KEY)"
        )
    return value.rstrip("/")


def _socket_url(value: str) -> str:
    path = unix_socket(value) or ""
    if not value.startswith("unix:///") or len(path) < 2 or path.endswith("/"):
        raise ValueError(f"not a socket's URL: {value!r}; write unix:///absolute/path")
    if len(path.encode()) > LONGEST_SOCKET_PATH:
        raise ValueError(
            f"{value!r}: a socket's path has {LONGEST_SOCKET_PATH} bytes at most; take a shorter"
        )
    return value


def _without_v1(url: str) -> str:
    return url if unix_socket(url) else url.removesuffix("/v1").rstrip("/")
