"""`tracegrad proxy`. Imports the server only when it is about to run."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from tracegrad.proxy.config import ProxySettings
    from tracegrad.store import Store

log = logging.getLogger("tracegrad.proxy")


def proxy_command(
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            help="The engine's base URL, or unix:///PATH of its socket; once for each replica."
            " Default: http://127.0.0.1:8000"
        ),
    ] = None,
    upstream_kind: Annotated[
        str | None,
        typer.Option(help="vllm, openai (any compatible server) or litellm. Default: vllm"),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="URL of the store. Default: sqlite:///.tracegrad/store.db"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The engine's model for every call, whatever name the agent gives."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder of the engine's tokenizer and chat template, or the model's name on the"
            " Hugging Face Hub."
        ),
    ] = None,
    redact: Annotated[
        list[str] | None,
        typer.Option(
            help="module:function that takes out of records what must not be stored;"
            " may be given more than once."
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Any other than loopback needs an admin key. Default: 127.0.0.1"),
    ] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one. Default: 4141")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that serve the port together. Default: 1")
    ] = None,
    fd: Annotated[
        int | None,
        typer.Option(
            help="File descriptor of a socket that listens already, in place of host and port:"
            " whoever supervises the proxy keeps it open while this is started again."
        ),
    ] = None,
) -> None:
    """Serve LLM calls to agents and record every turn.

    Every option may also stand in the environment (TRACEGRAD_STORE, TRACEGRAD_PROXY_UPSTREAM,
    TRACEGRAD_PROXY_PORT, ...) or in the table "proxy" of tracegrad.toml, where there are more.

    The admin key comes from TRACEGRAD_API_KEY; without one anyone on this machine may call. A key
    for weight pushes alone comes from TRACEGRAD_PROXY_CONTROL_KEY.
    """
    flags = {
        "upstream": upstream,
        "upstream_kind": upstream_kind,
        "store": store,
        "model": model,
        "tokenizer": tokenizer,
        "redact": redact,
        "host": host,
        "port": port,
        "workers": workers,
    }
    serve(_settings({name: value for name, value in flags.items() if value is not None}), fd=fd)


def serve(settings: ProxySettings, *, fd: int | None = None) -> None:
    """Run until Ctrl-C or SIGTERM. Exits with 2 and one line when it cannot start. `fd`: of a
    socket that listens already."""
    import uvicorn

    from tracegrad.host_memory import limit_arenas, tune_gc
    from tracegrad.log_format import write_log
    from tracegrad.proxy.app import create_app, writer_opening
    from tracegrad.proxy.http.limits import ConnectionLimits, raise_file_limit
    from tracegrad.proxy.http.protocol import server_config
    from tracegrad.proxy.store_writer.client import StoreWriter
    from tracegrad.proxy.store_writer.own_process import OwnProcess
    from tracegrad.proxy.store_writer.process import WriterProcess
    from tracegrad.store import Store, StoreError

    limit_arenas()
    write_log("proxy", settings.log_format, text="%(asctime)s %(name)s %(levelname)s %(message)s")
    if settings.workers > 1 and sys.platform != "linux":
        _fail("workers: more than one runs on Linux only; leave it out here")
    # Before anything starts a thread of its own, as what is imported for redaction may.
    process = WriterProcess.fork() if settings.workers == 1 else None
    _check_hooks(settings.redact)
    settings = _with_tokenizer_folder(settings)
    if settings.chat_template is not None and not settings.chat_template.is_file():
        _fail(f"chat_template: there is no file {settings.chat_template}")
    listener = _listener(settings, fd)
    try:
        store = Store.open(settings.store)
    except (StoreError, ValueError) as error:
        _fail(f"store {settings.store}: {error}")
    if process is None:
        _serve_with_workers(settings, listener, store)
        return
    limits = ConnectionLimits.of(settings)
    connections = raise_file_limit(limits.connections)
    _warn_of_few_files(connections, settings)
    with store, StoreWriter(OwnProcess(process), writer_opening(settings)) as writer:
        app = create_app(settings, store=store, writer=writer)
        config = server_config(app, replace(limits, connections=connections))
        print(_first_line(settings, listener, store), flush=True)
        tune_gc()
        server = uvicorn.Server(config)
        ended_by: list[int] = []

        def end(number: int, frame: FrameType | None) -> None:
            ended_by.append(number)
            server.handle_exit(number, frame)

        # uvicorn passes a signal on when it has shut down; then come the writer and the store.
        signal.signal(signal.SIGTERM, end)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    if ended_by:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


def _serve_with_workers(settings: ProxySettings, listener: socket.socket, store: Store) -> None:
    from tracegrad.host_memory import tune_gc
    from tracegrad.proxy.http.limits import raise_file_limit
    from tracegrad.proxy.workers.supervisor import Supervisor
    from tracegrad.proxy.workers.worker import worker_settings
    from tracegrad.store import StoreError

    each = raise_file_limit(worker_settings(settings).max_connections)  # of what it will start
    _warn_of_few_files(each * settings.workers, settings)
    try:
        version = store.current_version() or 0
    except StoreError as error:
        _fail(f"store {settings.store}: {error}")
    finally:
        store.close()  # no connection of it may be in two processes
    first = f"{_first_line(settings, listener, store)}, {settings.workers} workers"
    tune_gc()
    code = Supervisor(
        settings, listener, version=version, announce=lambda: print(first, flush=True)
    ).run()
    if code < 0:  # as a proxy of one process ends
        signal.signal(-code, signal.SIG_DFL)
        signal.raise_signal(-code)
    raise typer.Exit(code)


def _warn_of_few_files(connections: int, settings: ProxySettings) -> None:
    if connections < settings.max_connections:
        log.warning("max_connections: the system gives files for %d only", connections)


def _first_line(settings: ProxySettings, listener: socket.socket, store: Store) -> str:
    name, port = listener.getsockname()[:2]
    url = store.database.url.render_as_string(hide_password=True)
    return f"tracegrad proxy on http://{_url_host(name)}:{port} -> {settings.upstream}, store {url}"


def _check_hooks(names: Sequence[str]) -> None:
    from tracegrad.proxy.capture.redaction import HookError, load_hooks

    if names:
        sys.path.append(os.getcwd())  # the command itself does not look there, unlike `python -m`
    try:
        load_hooks(names)
    except HookError as error:
        _fail(str(error))


def _with_tokenizer_folder(settings: ProxySettings) -> ProxySettings:
    """What is not there is said now, not with the first call that a continuation would serve."""
    from tracegrad.chat.model_folder import ModelNotFound, find_model_folder

    if settings.tokenizer is None:
        return settings
    try:
        folder = find_model_folder(str(settings.tokenizer), weights=False)
    except ModelNotFound as error:
        _fail(f"tokenizer: {error}")
    return settings.model_copy(update={"tokenizer": folder})


def _settings(flags: dict[str, object]) -> ProxySettings:
    from pydantic import ValidationError

    from tracegrad.proxy.config import ProxySettings
    from tracegrad.settings_sources import problems, unknown_variables

    for line in unknown_variables(ProxySettings):
        print(f"tracegrad proxy: {line}", file=sys.stderr)
    try:
        return ProxySettings(**flags)  # type: ignore[arg-type]
    except ValidationError as error:
        for name, message in problems(error, ProxySettings).items():
            print(f"tracegrad proxy: {name}: {message}", file=sys.stderr)
        raise typer.Exit(2) from None
    except ValueError as error:
        _fail(str(error))


def _listener(settings: ProxySettings, fd: int | None) -> socket.socket:
    from tracegrad.proxy.http.listener import (
        ListenError,
        activated_listener,
        inherited_listener,
        listen,
    )

    another = "choose another with --port"
    try:
        if fd is not None:
            return inherited_listener(fd)
        if (passed := activated_listener()) is not None:
            return passed
        return listen(settings.host, settings.port, if_taken=another)
    except ListenError as error:
        _fail(str(error))


def _url_host(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def _fail(message: str) -> NoReturn:
    from tracegrad.log_format import write_last_words

    write_last_words(f"tracegrad proxy: {message}")
    raise typer.Exit(2)
