"""HAProxy with the configuration that we give people, in front of proxies of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from support.proxy.servers import eventually
from support.system import debian_packages
from tracegrad_trainer.utils.network import find_free_port

CONFIGURATION = Path(__file__).parents[3] / "deploy" / "haproxy.cfg"
_PROGRAM = "/usr/sbin/haproxy"  # which not everybody's PATH has


def program() -> str:
    """Installs Debian's package where it may and must."""
    if shutil.which(_PROGRAM) is None:
        debian_packages.install("haproxy")
    return _PROGRAM


@contextmanager
def balancer(ports: Sequence[int], log: Path) -> Iterator[str]:
    """The URL of the one address."""
    listen = f"127.0.0.1:{find_free_port()}"
    names = {f"PROXY_{number}": f"127.0.0.1:{port}" for number, port in enumerate(ports)}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [program(), "-db", "-f", str(CONFIGURATION)],
            env={**os.environ, "LISTEN": listen, **names},
            stdout=out,
            stderr=subprocess.STDOUT,
        )

    def serves() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"http://{listen}/haproxy/healthz").status_code == 200
        except httpx.TransportError:
            return False

    try:
        eventually(serves)
        yield f"http://{listen}"
    finally:
        process.kill()
        process.wait()
