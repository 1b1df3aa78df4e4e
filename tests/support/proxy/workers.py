"""A proxy of two workers, with a client that is connected to each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from support.engines.byte_tokenizer import save_byte_tokenizer
from support.engines.mock_engine import MockEngine
from support.proxy.proxy_process import ProxyProcess
from support.proxy.servers import CONTROL_KEY, serving
from tracegrad.store import Store

ADMIN_KEY = "admin-key-of-the-workers-tests"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
Json = dict[str, Any]


@dataclass(frozen=True)
class Workers:
    """`clients[n]` keeps one connection, to another worker than the other's."""

    proxy: ProxyProcess
    engine: MockEngine
    clients: tuple[httpx.Client, httpx.Client]
    store: Store

    def health(self) -> Json:
        """Asked over a connection of its own; of another worker where the first one was killed just
        now, and took the connection with it."""
        url = f"{self.proxy.url}/healthz"
        try:
            found: Json = httpx.get(url, timeout=20).json()
        except (httpx.ReadError, httpx.RemoteProtocolError):
            found = httpx.get(url, timeout=20).json()
        return found

    def answers(self) -> bool:
        """Whether any worker serves."""
        try:
            return bool(self.pids())
        except httpx.TransportError:
            return False

    def pids(self) -> list[int]:
        found: list[int] = self.health()["workers"]
        return found

    def processes(self) -> list[int]:
        """The workers, and what writes for them."""
        return [one.pid for one in psutil.Process(self.proxy.pid).children(recursive=True)]

    def writer(self) -> int:
        """That of an SQLite store."""
        [pid] = set(self.processes()) - set(self.pids())
        return pid

    def pid_of(self, client: httpx.Client) -> int:
        """The worker that the client's connection leads to."""
        stream = client.get("/healthz").extensions["network_stream"]
        inode = _inode_of_peer(self.proxy.port, stream.get_extra_info("client_addr")[1])
        pids = self.pids()
        found = [pid for pid in pids if f"socket:[{inode}]" in _files(pid)]
        assert len(found) == 1, f"of {pids} these have the connection: {found}"
        return found[0]

    @contextmanager
    def client_elsewhere(self, pid: int, **options: Any) -> Iterator[httpx.Client]:
        """One connection, to another worker than `pid`. Those that lead there are held meanwhile:
        the supervisor gives the next to whoever has the fewest."""
        with ExitStack() as found, ExitStack() as held:
            while self.pid_of(client := _client(self.proxy.url, **options)) == pid:
                held.callback(client.close)
            found.callback(client.close)
            held.close()
            yield client

    def chat(
        self,
        client: httpx.Client,
        messages: list[Json],
        rollout: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Json:
        """The answer to a call; its message is put behind `messages`."""
        path = f"/rollouts/{rollout}" if rollout else ""
        answer = client.post(
            f"{path}/v1/chat/completions",
            json={"model": "m", "messages": messages},
            headers=headers or {},
        )
        assert answer.status_code == 200, answer.text
        whole: Json = answer.json()
        said = whole["choices"][0]["message"]
        messages.append({"role": "assistant", "content": said["content"]})
        return whole


def _client(url: str, **options: Any) -> httpx.Client:
    """Of one connection."""
    limits = httpx.Limits(max_connections=1)
    return httpx.Client(
        **{"base_url": url, "timeout": 60, "headers": ADMIN, **options}, limits=limits
    )


def _inode_of_peer(server: int, client: int) -> str:
    """Of the server's end of the loopback connection between these ports."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        local, remote = (int(fields[n].partition(":")[2], 16) for n in (1, 2))
        if (local, remote) == (server, client):
            return fields[9]
    raise AssertionError(f"nobody is connected from port {client}")


def _files(pid: int) -> set[str]:
    folder = Path(f"/proc/{pid}/fd")
    found = set()
    for file in folder.iterdir():
        try:
            found.add(os.readlink(file))
        except OSError:  # closed meanwhile
            continue
    return found


def exists(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@contextmanager
def two_workers(
    store_url: str,
    folder: Path,
    constants: Mapping[str, float] | None = None,
    **settings: object,
) -> Iterator[Workers]:
    engine = MockEngine()
    model = folder / "model"
    model.mkdir()
    save_byte_tokenizer(model)
    with ExitStack() as stack:
        upstream = stack.enter_context(serving(engine.app(), lifespan="off"))
        settings = {"workers": 2, "tokenizer": model, "control_key": CONTROL_KEY, **settings}
        log = folder / "proxy.log"
        proxy = ProxyProcess(upstream, store_url, log, constants, **settings)
        stack.callback(proxy.close)
        proxy.start()
        first = stack.enter_context(_client(proxy.url))
        store = stack.enter_context(Store.open(store_url))
        one = Workers(proxy, engine, (first, first), store)
        second = stack.enter_context(one.client_elsewhere(one.pid_of(first)))
        yield replace(one, clients=(first, second))
