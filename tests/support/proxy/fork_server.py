"""`tracegrad ...` in forks of a process that has loaded all of it: a start takes no second.

Each line on standard input is a command (JSON: its `arguments`, `environment`, `constants` of
modules that are others there, and `log`, a file for all that it says); its process id comes back.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import uvicorn  # noqa: F401 (loaded for the forks, as are the next)

import tracegrad.proxy.app
import tracegrad.proxy.http.protocol
import tracegrad.proxy.workers.supervisor
from tracegrad.cli import main as tracegrad


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever dies is gone at once
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(**json.loads(line))
        print(child, flush=True)


def _run(
    arguments: list[str], environment: dict[str, str], constants: dict[str, float], log: str
) -> None:
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        assert hasattr(sys.modules[module], constant), name
        setattr(sys.modules[module], constant, value)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.argv = ["tracegrad", *arguments]
    code = 1
    try:
        tracegrad()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
