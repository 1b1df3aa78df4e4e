"""Where an engine listens, a TCP port or a Unix socket in a folder that nobody else may enter, and
HTTP clients for both (`unix:///path`)."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import ssl
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tracegrad.private_files import is_private, private_folder
from tracegrad.urls import LONGEST_SOCKET_PATH, http_base, unix_socket

# Below are those of well-known services.
_FIRST_PORT = 10_000


def http_client(url: str, *, timeout_s: float, key: str | None = None) -> httpx.Client:
    """A client for paths under `url`. `key` is sent as a bearer token.

    No connection is kept, so none can be stale, and no proxy of the environment's is asked.
    Certificates are those of the system, or of SSL_CERT_FILE, as in the SDK.
    """
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(
        base_url=http_base(url),
        headers={"authorization": f"Bearer {key}"} if key else None,
        timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 5.0)),
        # Reading the certificates takes longer than most calls.
        transport=httpx.HTTPTransport(
            uds=unix_socket(url),
            verify=url.startswith("https:") and ssl.create_default_context(),
            limits=limits,
            trust_env=False,
        ),
        trust_env=False,
    )


def short_socket_path(path: Path) -> Path:
    """`path`; where it is too long for a socket, always the same other one in a folder of ours
    under XDG_RUNTIME_DIR or the folder for temporary files."""
    path = path.absolute()
    if _fits(path):
        return path
    name = hashlib.sha256(bytes(path)).hexdigest()[:32] + ".sock"
    bases = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
    folders = [Path(base) / f"tracegrad-{os.geteuid()}" for base in bases if base]
    return next(found for folder in folders if _fits(found := folder / name))


def prepare_socket_folder(path: Path) -> None:
    """Its folder is there and ours alone, and no socket of a killed server is in the way.

    Raises:
        OSError: the folder cannot be made.
        ValueError: others may enter it, or a server listens there.
    """
    folder = path.parent
    if not folder.exists():
        private_folder(folder)
    if not is_private(folder):
        raise ValueError(
            f"vllm.socket: {folder} is not ours alone (mode 0700), and whoever reaches {path} may"
            " replace the weights; name a path in a folder that is"
        )
    if not is_port_closed(f"unix://{path}"):
        raise ValueError(f"vllm.socket: {path} is in use; stop what listens there")
    path.unlink(missing_ok=True)


def is_port_closed(url: str) -> bool:
    """Whether nobody listens there; a server that is busy listens."""
    path = unix_socket(url)
    try:
        if path is None:
            parts = urlsplit(url)
            assert parts.hostname is not None, url
            socket.create_connection((parts.hostname, parts.port or 80), timeout=2).close()
        else:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(2)
                client.connect(path)
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:  # busy, perhaps
        return False
    return False


def find_free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing is bound to at the moment, and that nobody takes soon but by its number:
    it is none of those that the kernel gives to connections going out."""
    below = min(_first_ephemeral_port(), 1 << 16)
    for _ in range(100):
        port = random.SystemRandom().randrange(_FIRST_PORT, below)
        with suppress(OSError), socket.socket() as probe:
            probe.bind((host, port))
            return port
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def _first_ephemeral_port() -> int:
    """Linux says; elsewhere the first of IANA's range. One that leaves hardly any below it is as
    good as none."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 49152
    return first if first > _FIRST_PORT + 1000 else 1 << 16


def _fits(path: Path) -> bool:
    return len(bytes(path)) <= LONGEST_SOCKET_PATH
