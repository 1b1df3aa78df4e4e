"""Debian's HAProxy with deploy/haproxy.cfg, before servers of the test's."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from support.packages.wheel import ROOT
from support.proxy.servers import eventually
from support.system import debian_packages
from tracegrad_trainer.utils.network import find_free_port

CONFIG = ROOT / "deploy" / "haproxy.cfg"


def program() -> str:
    """HAProxy. Installs Debian's package where it may and must."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if shutil.which("haproxy", path=path) is None:
        debian_packages.install("haproxy")
    found = shutil.which("haproxy", path=path)
    assert found is not None
    return found


def variables(proxies: Sequence[str]) -> dict[str, str]:
    """The environment that names these, each HOST:PORT."""
    return {f"PROXY_{number}": address for number, address in enumerate(proxies)}


def check(proxies: Sequence[str], config: Path = CONFIG) -> subprocess.CompletedProcess[str]:
    """What HAProxy's own check says of the file."""
    return subprocess.run(
        [program(), "-c", "-f", str(config)],
        env={**os.environ, **variables(proxies)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@contextmanager
def haproxy(urls: Sequence[str], log: Path, host: str = "127.0.0.1") -> Iterator[str]:
    """The one address of the servers at these URLs; with `host` "::" it is one of all."""
    with haproxy_process(urls, log, host=host) as (address, _):
        yield address


@contextmanager
def haproxy_process(
    urls: Sequence[str], log: Path, drain: str = "1s", host: str = "127.0.0.1"
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The one address, and who serves it."""
    port = find_free_port()
    address = f"127.0.0.1:{port}"
    servers = [url.removeprefix("http://") for url in urls]
    environment = {**os.environ, **variables(servers), "LISTEN": f"{host}:{port}", "DRAIN": drain}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [program(), "-db", "-f", str(CONFIG)], env=environment, stdout=out, stderr=out
        )
    try:
        eventually(lambda: process.poll() is not None or _listens(address))
        assert process.poll() is None, log.read_text()
        yield f"http://{address}", process
    finally:
        process.kill()
        process.wait(30)


def _listens(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/haproxy/healthz", timeout=5).status_code in (200, 503)
    except httpx.TransportError:
        return False
