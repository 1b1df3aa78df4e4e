"""The Docker engine's API, in threads: nothing here blocks the loop.

Podman and rootless Docker speak the same API at a socket of their own (DOCKER_HOST).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

import docker
import docker.utils
import requests.exceptions
import urllib3.exceptions
from docker.errors import APIError, DockerException, NotFound

from tracegrad.runner.sandbox import BrokenEnvironment, SandboxUnavailable

API_TIMEOUT_S = 60.0  # of one call; a start below a hundred others takes ten
_THREADS = 16
_FIX = "start one (dockerd), or name its socket in DOCKER_HOST"

# Not every OSError: a file of this machine may be missing.
_LOST = (
    DockerException,
    requests.exceptions.RequestException,
    urllib3.exceptions.HTTPError,
    ConnectionError,
    TimeoutError,
)

P = ParamSpec("P")
T = TypeVar("T")


class DockerEngine:
    """One engine.

    `api` is docker's own client; each of its functions is called through `call`.

    Attributes:
        is_podman: it says less of commands in a container.
        is_own: it is of the user who runs this, and so are its containers: rootless.
    """

    def __init__(
        self, api: docker.APIClient, *, is_podman: bool = False, is_own: bool = False
    ) -> None:
        self.api, self.is_podman, self.is_own = api, is_podman, is_own
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tracegrad-docker")

    @classmethod
    async def connect(cls, url: str | None = None) -> DockerEngine:
        """`url`: of its socket; None: what DOCKER_HOST says, else the usual one.

        Raises SandboxUnavailable.
        """
        api = await asyncio.to_thread(_client, url)
        parts = (await asyncio.to_thread(_answered, api.version)).get("Components") or []
        is_podman = any(str(each["Name"]).startswith("Podman") for each in parts)
        return cls(api, is_podman=is_podman, is_own=_is_own(_address(url)))

    async def call(self, function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Raises docker's NotFound and APIError as they are (`broken_or_unavailable`), and
        SandboxUnavailable where the engine does not answer."""
        work = partial(_answered, partial(function, *args, **named))
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def call_long(self, function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """As `call`, of what may take minutes. After a cancellation nobody waits for it, not even
        at the process's end: the engine gives up what nobody listens to."""
        work = partial(_answered, partial(function, *args, **named))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def answered(settle: Callable[[Any], None], value: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: None if answer.done() else settle(value))

        def run() -> None:
            try:
                found = work()
            except Exception as error:
                answered(answer.set_exception, error)
            else:
                answered(answer.set_result, found)

        threading.Thread(target=run, name="tracegrad-docker-long", daemon=True).start()
        return await answer

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        self.api.close()


def ping() -> None:
    """Raises SandboxUnavailable."""
    _client(None).close()


def _client(url: str | None) -> docker.APIClient:
    where = _address(url)
    try:
        settings = docker.utils.kwargs_from_env()
        if url is not None:
            settings["base_url"] = url
        return docker.APIClient(
            version="auto", timeout=int(API_TIMEOUT_S), max_pool_size=_THREADS, **settings
        )
    except (DockerException, requests.exceptions.RequestException, OSError) as error:
        raise SandboxUnavailable(f"no Docker engine at {where}: {_FIX} ({_short(error)})") from None


def _address(url: str | None) -> str:
    return url or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def _is_own(address: str) -> bool:
    """By its socket: Podman's API does not say that it is rootless."""
    scheme, _, path = address.partition("://")
    try:
        return scheme == "unix" and os.geteuid() != 0 and os.stat(path).st_uid == os.geteuid()
    except OSError:
        return False


def _answered(function: Callable[[], T]) -> T:
    try:
        return function()
    except APIError:
        raise
    except _LOST as error:
        raise SandboxUnavailable(f"the Docker engine does not answer: {_short(error)}") from None


def broken_or_unavailable(
    error: APIError, what: str, fix: str
) -> BrokenEnvironment | SandboxUnavailable:
    """By the engine's status: what it finds wrong with a request (4xx) stays wrong. 409: something
    else is going on with the same container, which passes."""
    said = f"{what}: {explanation(error)}"
    code = error.status_code
    if code is not None and 400 <= code < 500 and code != 409:
        return BrokenEnvironment(f"{said}; {fix}")
    return SandboxUnavailable(said)


def explanation(error: APIError) -> str:
    """The engine's words, on one line."""
    words = error.explanation
    text = words.decode(errors="replace") if isinstance(words, bytes) else str(words or error)
    return " ".join(text.split())[:500]


def is_lost(error: APIError) -> bool:
    """Whether it is the container that is not there, and not what was asked of it."""
    # Docker begins with it, Podman ends so.
    return isinstance(error, NotFound) and "no such container" in explanation(error).lower()


def gone(error: APIError) -> bool:
    """Whether what was to be removed is removed, or is being removed by somebody."""
    return isinstance(error, NotFound) or error.status_code == 409


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
