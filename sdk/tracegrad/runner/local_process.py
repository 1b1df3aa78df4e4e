"""An agent's command as processes of this machine: its output kept, its time bounded, all of it
ended.

What a command starts may leave its process group (npm, tmux, daemons). Each of them still has the
rollout's address in its environment, by which it is found and killed with the others. On Linux the
command ends with this process, also where that is killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import functools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tracegrad.private_files import open_private
from tracegrad.runner.cancellation import to_its_end
from tracegrad.runner.outcomes import ProcessEnd
from tracegrad.runner.output_capture import CHUNK, OutputCapture
from tracegrad.runner.sandbox import SandboxUnavailable

GRACE_S = 5.0  # between SIGTERM and SIGKILL
_LOOK_AGAIN_S = 0.02
_LOOKS = 3
_PR_SET_PDEATHSIG = 1
# What is wrong with a command itself. Whatever else the system refuses is the machine's lack.
_OF_THE_COMMAND = {
    errno.E2BIG,
    errno.EACCES,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOEXEC,
    errno.ENOTDIR,
    errno.EPERM,
}


@dataclass(frozen=True, slots=True)
class Rlimits:
    """`memory_mb`: MiB of addresses of each process; None: no bound."""

    memory_mb: int | None = None

    def apply(self) -> None:
        """In the child, before its program."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.memory_mb is not None:
            resource.setrlimit(resource.RLIMIT_AS, (self.memory_mb << 20, self.memory_mb << 20))


async def run_process(
    command: Sequence[str] | str,
    *,
    folder: Path,
    environ: Mapping[str, str],
    timeout_s: float | None,
    output: Path,
    marker: str,
    echo: Callable[[bytes], object] | None = None,
    limits: Rlimits = Rlimits(),
) -> ProcessEnd:
    """Runs to its end, or to `timeout_s`; nothing of it is left then.

    Args:
        command: words, or a line for the shell.
        folder: where it runs.
        output: a file for what it prints, both streams in the order of their arrival.
        marker: stands in the value of a variable of `environ`, and in no other process's.
        echo: gets what it prints, too.

    A cancellation ends it and is raised.

    Raises:
        SandboxUnavailable: this machine has no process, memory, file or disk left for it.
    """
    began = time.monotonic()
    with open_private(output, "wb") as file:
        capture = _Capture(file, echo)
        # A pipe of our own: asyncio's `wait` would wait for whoever else holds one of its pipes.
        ours, theirs = os.pipe()
        reader = asyncio.create_task(capture.read(ours))
        process = None
        try:
            process = await _start(command, folder, environ, theirs, limits)
        except OSError as error:
            name = command if isinstance(command, str) else command[0]
            said = f"{name}: {error.strerror or error}"
            if error.errno not in _OF_THE_COMMAND:
                raise SandboxUnavailable(f"could not be started: {said}") from None
            return ProcessEnd(None, 0.0, error=said)
        finally:
            os.close(theirs)
            if process is None:  # it may have begun, where a cancellation came: asyncio kills it
                await to_its_end(_end_started(marker, reader))
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            await to_its_end(_end(process, marker, reader))
    seconds = time.monotonic() - began
    capture.check()
    code = None if timed_out else process.returncode
    return ProcessEnd(code, seconds, timed_out=timed_out, last_line=capture.last_line())


async def _start(
    command: Sequence[str] | str,
    folder: Path,
    environ: Mapping[str, str],
    output: int,
    limits: Rlimits,
) -> asyncio.subprocess.Process:
    if isinstance(command, str):
        command = ["/bin/sh", "-c", command]
    return await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=dict(environ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=limits.apply if _prctl is None else functools.partial(_prepare, limits),
    )


# Found here: the child of a fork may not look for it, another thread may hold the loader's lock.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def _prepare(limits: Rlimits) -> None:
    """In the child, before its program: it ends with its parent."""
    assert _prctl is not None
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    limits.apply()


class _Capture(OutputCapture):
    async def read(self, pipe: int) -> None:
        """To the end of the pipe, which it closes."""
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb")
        )
        try:
            while some := await stream.read(CHUNK):
                self.take(some)
        finally:
            transport.close()


async def _until_read(reader: asyncio.Task[None]) -> None:
    """Who holds the pipe yet dropped the marker on purpose, and is not waited for."""
    with suppress(TimeoutError):
        await asyncio.wait_for(reader, GRACE_S)


async def _end(
    process: asyncio.subprocess.Process, marker: str, reader: asyncio.Task[None]
) -> None:
    """Of the command, all that it started, and its output."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    await _end_started(marker, reader)


async def _end_started(marker: str, reader: asyncio.Task[None]) -> None:
    await asyncio.to_thread(end_marked, marker)
    await _until_read(reader)


def end_marked(marker: str) -> None:
    """Until none is seen in several looks: one that is forked, or begins its program, just while it
    is looked at is not seen."""
    deadline = time.monotonic() + GRACE_S
    unseen = 0
    while unseen < _LOOKS and time.monotonic() < deadline:
        if kill_marked(marker):
            unseen = 0
            time.sleep(_LOOK_AGAIN_S)
        else:
            unseen += 1


def kill_marked(marker: str) -> int:
    """SIGKILL to every process of ours with `marker` in its environment; how many there were."""
    killed = 0
    sought, own = marker.encode(), os.getpid()
    for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
            if pid != own and sought in environ.read():
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed
