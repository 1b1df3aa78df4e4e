"""One command in a container: its output, its time, its end as the engine tells it."""

from __future__ import annotations

import asyncio
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from docker.errors import APIError

from tracegrad.private_files import open_private
from tracegrad.runner.cancellation import to_its_end
from tracegrad.runner.container_processes import ContainerProcesses
from tracegrad.runner.docker_engine import DockerEngine, explanation
from tracegrad.runner.docker_events import ContainerWatch
from tracegrad.runner.outcomes import ProcessEnd
from tracegrad.runner.output_capture import CHUNK, OutputCapture
from tracegrad.runner.sandbox import SandboxError, SandboxUnavailable

GRACE_S = 5.0  # between SIGTERM and SIGKILL, and for the last of the output
_ASK_S = 30.0  # the engine is asked so often whether the command runs: an event may be lost
_KILLED = 137  # 128 + SIGKILL
_NOT_STARTED = (126, 127)
_FRAME_HEAD = 8  # bytes: which stream, three zeros, the frame's length
# In what the engine says of a command that it could not start: the image's own fault.
_NOT_THERE = ("executable file not found", "no such file or directory", "permission denied",
              "exec format error", "not a directory")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExecTarget:
    """A container as commands meet it. `user`: None: the one that it was made with."""

    engine: DockerEngine
    container: str
    watch: ContainerWatch
    processes: ContainerProcesses
    workdir: str
    user: str | None


async def run_in_container(
    target: ExecTarget,
    command: Sequence[str] | str,
    *,
    environ: Mapping[str, str | None],
    timeout_s: float | None,
    output: Path,
    echo: Callable[[bytes], object] | None = None,
) -> ProcessEnd:
    """As of `Sandbox.run`. Everything in the container ends with the command."""
    began = time.monotonic()
    memory_before = target.watch.out_of_memory
    with open_private(output, "wb") as file:
        capture = OutputCapture(file, _on_loop(echo))
        starting = asyncio.create_task(_start(target, command, environ))
        try:
            exec_id, raw = await asyncio.shield(starting)
        except asyncio.CancelledError:
            with suppress(SandboxError, APIError):
                await to_its_end(_end_start(target, starting, capture))
            raise
        except APIError as error:
            return _not_started(command, explanation(error))
        reader = _OutputReader(raw, capture)
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                await _ended(target, exec_id, reader)
        except TimeoutError:
            timed_out = True
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await to_its_end(_end(target, exec_id, reader))
            raise
        await to_its_end(_end(target, exec_id, reader))
    seconds, last_line = time.monotonic() - began, capture.last_line()
    capture.check()
    if timed_out:
        return ProcessEnd(None, seconds, timed_out=True, last_line=last_line)
    if target.watch.died.is_set():
        return await _end_of_container(target, seconds, last_line)
    found = await _inspect(target, exec_id)
    code = found["ExitCode"]
    if code is None:
        raise SandboxUnavailable("the engine does not know how the command ended")
    # Of one without a process all that was printed is the engine's. Podman forgets the process of
    # each that has ended: there the shell says it (`_start`), as any program could.
    if not found["Pid"] and code in _NOT_STARTED and not target.engine.is_podman:
        return _not_started(command, last_line)
    out_of_memory = code == _KILLED and target.watch.out_of_memory > memory_before
    return ProcessEnd(code, seconds, last_line=last_line, out_of_memory=out_of_memory)


async def _start(
    target: ExecTarget, command: Sequence[str] | str, environ: Mapping[str, str | None]
) -> tuple[str, Any]:
    if isinstance(command, str):
        command = ["/bin/sh", "-c", command]
    api = target.engine.api
    variables = [f"{name}={value}" for name, value in environ.items() if value is not None]
    unset = [name for name, value in environ.items() if value is None]
    if target.engine.is_podman:  # takes no variable away, and nobody knows what did not start
        line = f'{f"unset {shlex.join(unset)}; " if unset else ""}exec "$@"'
        command = ["/bin/sh", "-c", line, "sh", *command]
    else:
        variables += unset  # a name alone: not to be set
    made = await target.engine.call(
        api.exec_create,
        target.container,
        list(command),
        environment=variables,
        workdir=target.workdir,
        user=target.user or "",
    )
    return made["Id"], await target.engine.call(api.exec_start, made["Id"], socket=True)


async def _ended(target: ExecTarget, exec_id: str, reader: _OutputReader) -> None:
    """By the engine's word: the end of the output is only a hint to ask for it."""
    events = (target.watch.ended(exec_id), target.watch.died, reader.done)
    signs: list[asyncio.Task[Any]] = [asyncio.create_task(each.wait()) for each in events]
    try:
        while True:
            done, _ = await asyncio.wait(signs, timeout=_ASK_S, return_when=asyncio.FIRST_COMPLETED)
            if signs[0] in done or signs[1] in done:
                return
            if not (await _inspect(target, exec_id))["Running"]:
                return
            if signs[2] in done:  # it closed its output and goes on
                signs[2] = asyncio.create_task(asyncio.sleep(_ASK_S))
    finally:
        for each in signs:
            each.cancel()


async def _end_start(
    target: ExecTarget, starting: asyncio.Task[tuple[str, Any]], capture: OutputCapture
) -> None:
    """A thread that starts a command is not to be stopped."""
    exec_id, raw = await starting
    await _end(target, exec_id, _OutputReader(raw, capture))


async def _end(target: ExecTarget, exec_id: str, reader: _OutputReader) -> None:
    """Of all that it started, and of its output."""
    ended = target.watch.ended(exec_id)
    try:
        gone = ended.is_set() or target.watch.died.is_set()
        if not gone and (await _inspect(target, exec_id))["Running"]:
            await target.processes.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await _ended(target, exec_id, reader)
        if not target.watch.died.is_set():
            await target.processes.end()
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.done.wait(), GRACE_S)
    finally:
        target.watch.forget(exec_id)
        await asyncio.to_thread(reader.close)


async def _inspect(target: ExecTarget, exec_id: str) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = await target.engine.call(target.engine.api.exec_inspect, exec_id)
        return found
    except APIError as error:
        said = f"the container was lost while a command ran in it: {explanation(error)}"
        raise SandboxUnavailable(said) from None


async def _end_of_container(target: ExecTarget, seconds: float, last_line: str) -> ProcessEnd:
    """Out of memory it is the command's doing. Raises SandboxUnavailable: it is not."""
    try:
        found = await target.engine.call(target.engine.api.inspect_container, target.container)
    except APIError as error:
        said = f"the container was lost while a command ran in it: {explanation(error)}"
        raise SandboxUnavailable(said) from None
    state = found["State"]
    if state.get("OOMKilled"):
        return ProcessEnd(_KILLED, seconds, last_line=last_line, out_of_memory=True)
    raise SandboxUnavailable(
        "the container ended while a command ran in it: "
        + (state.get("Error") or f"exit code {state['ExitCode']}")
    )


def _not_started(command: Sequence[str] | str, said: str) -> ProcessEnd:
    """Raises SandboxUnavailable: not for a reason of the image's."""
    name = command if isinstance(command, str) else command[0]
    if not any(each in said for each in _NOT_THERE):
        raise SandboxUnavailable(f"the engine could not start a command: {said}")
    return ProcessEnd(None, 0.0, error=f"{name}: {said.rpartition('process: ')[2]}")


def _on_loop(echo: Callable[[bytes], object] | None) -> Callable[[bytes], object] | None:
    """To be called by a thread."""
    if echo is None:
        return None
    loop = asyncio.get_running_loop()
    return lambda some: loop.call_soon_threadsafe(echo, some)


class _OutputReader:
    """A thread that reads what the command prints; `done` when that is all."""

    def __init__(self, raw: Any, capture: OutputCapture) -> None:
        self.done = asyncio.Event()
        self._raw, self._capture = raw, capture
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._read, name="tracegrad-exec", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            _socket(self._raw).settimeout(None)  # a command may print nothing for hours
            for some in _frames(_buffered(self._raw)):
                self._capture.take(some)
        except (OSError, ValueError):
            pass  # closed by us, or lost: the engine says how the command ended
        finally:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.done.set)

    def close(self) -> None:
        """Ends a read that is blocked, too."""
        with suppress(OSError):
            _socket(self._raw).shutdown(2)
        with suppress(OSError):
            self._raw.close()
        self._thread.join(GRACE_S)


def _frames(file: BufferedReader) -> Iterator[bytes]:
    """What the frames of both streams hold."""
    while len(head := file.read(_FRAME_HEAD)) == _FRAME_HEAD:
        left = int.from_bytes(head[4:])
        while left and (some := file.read1(min(left, CHUNK))):
            left -= len(some)
            yield some


def _buffered(raw: Any) -> BufferedReader:
    """`exec_start` gives what lies below the buffer from which the answer's head was read, and
    whoever is late to read that has the first of the output in the buffer, too."""
    found: BufferedReader = raw._response.raw._fp.fp
    return found


def _socket(raw: Any) -> Any:
    """What `exec_start` gives: a SocketIO about a socket, or a socket (TLS)."""
    return getattr(raw, "_sock", raw)
