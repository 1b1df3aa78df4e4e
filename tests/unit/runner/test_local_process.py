"""Commands as processes: what they print is kept, and nothing of them is left."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.proxy.servers import eventually
from tracegrad.runner import local_process, output_capture
from tracegrad.runner.local_process import run_process
from tracegrad.runner.outcomes import ProcessEnd
from tracegrad.runner.sandbox import SandboxUnavailable

MARKER = "/rollouts/of-this-test/"
ENVIRON = {**os.environ, "OPENAI_BASE_URL": f"http://127.0.0.1:1{MARKER}v1"}

# Leaves the process group and the session, says its pid, and goes on for ever.
DAEMON = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(1000)
"""


async def run(
    tmp_path: Path,
    *command: str,
    timeout_s: float | None = None,
    environ: Mapping[str, str] = ENVIRON,
) -> tuple[ProcessEnd, str]:
    output = tmp_path / "agent.log"
    end = await run_process(
        command,
        folder=tmp_path,
        environ=environ,
        timeout_s=timeout_s,
        output=output,
        marker=MARKER,
    )
    return end, output.read_text()


def is_gone(pid: int) -> bool:
    """A zombie is: some init of a container reaps it late, or never."""
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


async def test_both_streams_are_kept_in_order_and_the_last_line_is_known(tmp_path: Path) -> None:
    end, said = await run(tmp_path, "sh", "-c", "echo one; echo two >&2; echo; exit 3")
    assert (end.exit_code, end.timed_out, end.last_line) == (3, False, "two")
    assert said == "one\ntwo\n\n"


async def test_more_than_is_kept_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_capture, "MAX_OUTPUT", 1000)
    end, said = await run(tmp_path, "sh", "-c", "head -c 300000 /dev/zero; echo; echo last")
    assert (len(said), end.last_line) == (1000, "last")


async def test_a_full_disk_is_not_the_commands_doing(tmp_path: Path) -> None:
    """And it is read to its end: nobody waits for a reader."""
    (tmp_path / "agent.log").symlink_to("/dev/full")
    with pytest.raises(SandboxUnavailable, match="could not be kept: No space"):
        await run(tmp_path, "sh", "-c", "head -c 300000 /dev/zero && echo > read")
    assert (tmp_path / "read").exists()


async def test_a_command_that_is_not_there_says_so(tmp_path: Path) -> None:
    end, _ = await run(tmp_path, "no-such-agent")
    assert end.exit_code is None
    assert end.error == "no-such-agent: No such file or directory"


async def test_what_the_machine_lacks_is_not_the_commands_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing reads the output of a command that never was."""

    async def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    with pytest.raises(SandboxUnavailable, match="could not be started: true: Resource temp"):
        await run(tmp_path, "true")
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_left_the_group_is_ended_with_the_others(tmp_path: Path) -> None:
    """Also where it holds the pipe that its output goes to."""
    end, said = await run(tmp_path, sys.executable, "-c", DAEMON)
    assert end.exit_code == 0
    assert local_process.kill_marked(MARKER) == 0
    # The daemon may be ended before it says its pid; and one that is killed takes a while to go.
    pids = [int(pid) for pid in said.split()]
    await asyncio.to_thread(eventually, lambda: all(map(is_gone, pids)), 60)


async def test_time_is_bounded_and_a_deaf_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_process, "GRACE_S", 0.2)
    deaf = "trap '' TERM; echo $$; while :; do sleep 1; done"
    end, said = await run(tmp_path, "sh", "-c", deaf, timeout_s=1.0)
    assert (end.timed_out, end.exit_code) == (True, None)
    assert all(is_gone(int(pid)) for pid in said.split())


async def test_a_cancellation_ends_it(tmp_path: Path) -> None:
    running = asyncio.create_task(run(tmp_path, "sh", "-c", "echo $$; sleep 1000"))
    output = tmp_path / "agent.log"
    await asyncio.to_thread(eventually, lambda: output.exists() and output.read_text(), 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert is_gone(int(output.read_text()))


async def test_a_second_cancellation_waits_for_the_end_of_a_deaf_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is interrupted while an attempt is cut, or after its time-out."""
    monkeypatch.setattr(local_process, "GRACE_S", 0.5)
    deaf = "trap '' TERM; echo $$; (while :; do sleep 1; done) & echo $!; wait; sleep 1000"
    running = asyncio.create_task(run(tmp_path, "sh", "-c", deaf))
    output = tmp_path / "agent.log"
    await asyncio.to_thread(
        eventually, lambda: output.exists() and output.read_text().count("\n") == 2, 60
    )
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert all(is_gone(int(pid)) for pid in output.read_text().split())


async def test_a_cancellation_while_it_starts_ends_what_it_started_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = asyncio.create_subprocess_exec

    async def slow(*command: Any, **named: Any) -> None:
        process = await start(*command, **named)
        try:
            await asyncio.Event().wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()  # as asyncio does
            await process.wait()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    running = asyncio.create_task(run(tmp_path, sys.executable, "-c", DAEMON))
    output = tmp_path / "agent.log"
    await asyncio.to_thread(eventually, lambda: output.exists() and output.read_text(), 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.to_thread(eventually, lambda: is_gone(int(output.read_text())), 60)
