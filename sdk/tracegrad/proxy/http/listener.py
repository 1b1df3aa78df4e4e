"""The socket that clients connect to. Whoever supervises a proxy opens it and hands it on: calls
wait in it, and none is refused, while the proxy is started again."""

from __future__ import annotations

import errno
import os
import socket

BACKLOG = 2048  # connections that nobody has accepted yet
_FIRST_PASSED = 3  # SD_LISTEN_FDS_START


class ListenError(OSError):
    """Why nobody can listen there, in one line."""


def listen(host: str, port: int, *, field: str = "", if_taken: str) -> socket.socket:
    """`field` is the port's name in settings, `if_taken` what to do where another listens there.
    `::` is every address, IPv4's as well.

    Raises:
        ListenError: in these words.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    name = f"{field}: " if field else ""
    try:
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"{name}port {port} of {host} is in use; {if_taken}") from None
        words = error.strerror or str(error)
        raise ListenError(f"{name}cannot listen on {host}:{port}: {words}") from None


def activated_listener() -> socket.socket | None:
    """The one that an init system opened for this process and keeps open while it is started again
    (systemd's socket units, sd_listen_fds(3)); None: there is none.

    Raises:
        ListenError: there are several, or it is not a TCP socket that listens.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    if (count := os.environ.get("LISTEN_FDS")) != "1":
        raise ListenError(f"LISTEN_FDS: {count} sockets were passed, and one is served: name one")
    return inherited_listener(_FIRST_PASSED)


def inherited_listener(fd: int) -> socket.socket:
    """That of a supervisor: uvicorn's `--fd`, systemd's sockets (from 3 on).

    Raises:
        ListenError: `fd` is not a TCP socket that listens.
    """
    try:
        found = socket.socket(fileno=fd)
        tcp = found.family in (socket.AF_INET, socket.AF_INET6)
        listens = tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ListenError(f"fd: {fd} is no socket: {error.strerror}") from None
    if not listens:
        found.detach()
        raise ListenError(f"fd: {fd} is no TCP socket that listens")
    return found
