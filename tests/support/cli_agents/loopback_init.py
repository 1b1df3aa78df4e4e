"""Process 1 of a namespace that has only loopback. Standard library only; see loopback.py.

`python loopback_init.py FD`: FD is a seqpacket socket on which it is told, in JSON, what to do.
`{"listen": PORT}`: a socket that listens on 127.0.0.1:PORT in here goes out.
`{"run": [ARGUMENT, ...], "cwd": FOLDER, "env": {...}}`, with a file descriptor: the program runs
with its output there, then its exit code goes out.
When FD is closed, so is the namespace: the kernel kills all that is in it along with process 1.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from typing import Any

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
LONGEST = 1 << 16


def bring_up_loopback() -> None:
    """What `ip link set lo up` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        flags = struct.unpack("16sH14x", request)[1] | IFF_UP
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags))


def run(order: dict[str, Any], output: int) -> int:
    process = subprocess.Popen(
        order["run"],
        cwd=order["cwd"],
        env=order["env"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    while True:
        # Children of processes that have died are ours, too.
        pid, status = os.waitpid(-1, 0)
        if pid == process.pid:
            return os.waitstatus_to_exitcode(status)


def end_with(control: socket.socket) -> None:
    """Waits, whatever else is going on, until the other side is closed."""
    hung_up = select.poll()
    hung_up.register(control, 0)
    hung_up.poll()
    os._exit(0)


def main() -> None:
    bring_up_loopback()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        threading.Thread(target=end_with, args=(control,), daemon=True).start()
        control.send(b"up")
        while True:
            told, descriptors, _, _ = socket.recv_fds(control, LONGEST, 1)
            if not told:
                return
            order = json.loads(told)
            if "listen" in order:
                with socket.create_server(("127.0.0.1", order["listen"])) as listener:
                    socket.send_fds(control, [b"listening"], [listener.fileno()])
            else:
                code = run(order, *descriptors)
                os.close(*descriptors)
                control.send(b"%d" % code)


if __name__ == "__main__":
    main()
