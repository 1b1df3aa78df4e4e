"""`tracegrad proxy`. Imports the server only when it is about to run."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import socket
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from tracegrad.settings import ProxySettings

# Seconds that calls in flight get to finish after Ctrl-C.
SHUTDOWN_S = 5


def proxy_command(
    upstream: Annotated[
        str | None, typer.Option(help="The engine's base URL. Default: http://127.0.0.1:8000")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="URL of the store. Default: sqlite:///.tracegrad/store.db"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The engine's model for every call, whatever name the agent gives."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Loopback address. Default: 127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one. Default: 4141")] = None,
) -> None:
    """Serve LLM calls to agents and record every turn.

    Every option may also stand in the environment (TRACEGRAD_STORE, TRACEGRAD_PROXY_UPSTREAM,
    TRACEGRAD_PROXY_PORT, TRACEGRAD_PROXY_HOST) or in the table "proxy" of tracegrad.toml.
    """
    flags = {
        "upstream": upstream,
        "store": store,
        "model": model,
        "host": host,
        "port": port,
    }
    settings = _settings({name: value for name, value in flags.items() if value is not None})
    serve(settings)


def serve(settings: ProxySettings) -> None:
    """Run until Ctrl-C or SIGTERM. Exits with 2 and one line when it cannot start."""
    import uvicorn

    from tracegrad.proxy.app import create_app
    from tracegrad.store import Store, StoreError, Writer

    listener = _listen(settings.host, settings.port)
    try:
        store = Store.open(settings.store)
    except (StoreError, ValueError) as error:
        _fail(f"store {settings.store}: {error}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    with store, Writer(store) as writer:
        app = create_app(settings, store=store, writer=writer)
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            lifespan="on",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        name, port = listener.getsockname()[:2]
        print(
            f"tracegrad proxy on http://{_url_host(name)}:{port} -> {settings.upstream}, "
            f"store {store.url.render_as_string(hide_password=True)}",
            flush=True,
        )
        _calm_collector()
        # uvicorn has shut down in order by the time it passes the signal on.
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def _calm_collector() -> None:
    """Every answer is parsed into a thousand objects that are soon dropped, none in a cycle.

    By default Python would look through all memory for cycles again and again meanwhile.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _settings(flags: dict[str, object]) -> ProxySettings:
    from pydantic import ValidationError

    from tracegrad.settings import ProxySettings

    try:
        return ProxySettings(**flags)  # type: ignore[arg-type]
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(map(str, problem["loc"]))
            print(f"tracegrad proxy: {name}: {problem['msg']}", file=sys.stderr)
        raise typer.Exit(2) from None
    except ValueError as error:
        _fail(str(error))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            _fail(f"port {port} of {host} is in use; choose another with --port")
        _fail(f"cannot listen on {host}:{port}: {error.strerror}")


def _url_host(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def _fail(message: str) -> NoReturn:
    print(f"tracegrad proxy: {message}", file=sys.stderr)
    raise typer.Exit(2)
