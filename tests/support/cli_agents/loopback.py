"""A network namespace with nothing but loopback, for programs that would like to phone home.

What runs in it sees only its own processes, and is killed with it, whatever sessions and
groups its processes have moved to. Servers outside are reached through `relay`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_INIT = Path(__file__).with_name("loopback_init.py")
_MEND = (
    "these tests run agents in a network namespace of their own, which this machine does not allow"
    " ({reason}). Run them as root with CAP_SYS_ADMIN (in a container: --privileged, or --cap-add"
    " SYS_ADMIN and --security-opt seccomp=unconfined), or allow user namespaces"
    " (sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0)"
)
PORT = 4141  # inside, every port is free


class NoNamespace(RuntimeError):
    """This machine does not let us make a namespace; the message says what would."""


@dataclass(frozen=True, slots=True)
class Loopback:
    _control: socket.socket  # to process 1 in there

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        log: Path,
        timeout_s: float,
    ) -> int:
        """The exit code of `command`, run inside with `env` and no more; its output is in `log`.

        TimeoutError after `timeout_s`; then the command runs on until the namespace ends, and
        nothing else can be run in it.
        """
        order = {"run": list(command), "cwd": str(cwd), "env": dict(env)}
        with log.open("wb") as output:
            socket.send_fds(self._control, [json.dumps(order).encode()], [output.fileno()])
        self._control.settimeout(timeout_s)
        return int(self._control.recv(16))

    @contextmanager
    def relay(self, url: str) -> Iterator[str]:
        """What listens at `url` outside, as seen from inside: the URL there."""
        target = urlsplit(url)
        assert target.hostname is not None
        assert target.port is not None
        with self._listen(PORT) as listener:
            address = (target.hostname, target.port)
            threading.Thread(target=_accept, args=(listener, address), daemon=True).start()
            try:
                yield f"http://127.0.0.1:{PORT}"
            finally:
                # Else the thread would go on waiting in a socket that is closed.
                listener.shutdown(socket.SHUT_RDWR)

    def _listen(self, port: int) -> socket.socket:
        """A socket belongs to the namespace that it was made in, wherever it is used."""
        self._control.send(json.dumps({"listen": port}).encode())
        _, [descriptor], _, _ = socket.recv_fds(self._control, 16, 1)
        return socket.socket(fileno=descriptor)


@contextmanager
def loopback() -> Iterator[Loopback]:
    """A new namespace; all that is left in it is killed at the end. Raises NoNamespace."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child"]
    # It makes /proc private, which is enough, and possible in a chroot too.
    command += ["--mount-proc", "--propagation=unchanged"]
    if os.geteuid() != 0:
        command += ["--user", "--map-root-user"]
    command += ["--", sys.executable, "-I", str(_INIT), str(theirs.fileno())]
    with ours:
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            if ours.recv(2) != b"up":
                lines = process.communicate()[1].strip().splitlines()
                raise NoNamespace(_MEND.format(reason=lines[-1] if lines else "no reason given"))
            yield Loopback(ours)
        finally:
            ours.close()
            process.communicate(timeout=10)


def _accept(listener: socket.socket, target: tuple[str, int]) -> None:
    while True:
        try:
            inner, _ = listener.accept()
        except OSError:  # closed
            return
        try:
            outer = socket.create_connection(target)
        except OSError:  # as inside: nobody listens
            inner.close()
            continue
        threading.Thread(target=_join, args=(inner, outer), daemon=True).start()


def _join(inner: socket.socket, outer: socket.socket) -> None:
    """Two connections as one, until both sides have said all."""
    with inner, outer:
        back = threading.Thread(target=_copy, args=(outer, inner), daemon=True)
        back.start()
        _copy(inner, outer)
        back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
