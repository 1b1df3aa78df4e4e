"""What a child's log says of its end, in one line."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tracegrad_trainer.rl.rank_main import StopFlag, run_as_rank
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess, traceback_errors

LAUNCHERS_LAST_WORDS = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "forward.py", line 1, in forward
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
E1122 10:00:00 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1)
============================================================
tracegrad_trainer.rl.serve_worker FAILED
============================================================
"""


def test_a_ranks_error_is_found_before_the_launchers_frame(tmp_path: Path) -> None:
    [found] = traceback_errors(LAUNCHERS_LAST_WORDS.splitlines())
    assert found.startswith("torch.OutOfMemoryError: CUDA out of memory")
    ended = _ended_with(LAUNCHERS_LAST_WORDS.splitlines(), tmp_path)
    assert "exited with 1: torch.OutOfMemoryError: CUDA out" in ended


PEER_LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:4"
NO_ROOM = "CheckpointError: step 3: No space left on device"


@pytest.mark.parametrize("lines", [[NO_ROOM, PEER_LOST], [PEER_LOST, NO_ROOM], [NO_ROOM]])
def test_a_ranks_error_is_found_beside_that_of_its_peers(lines: list[str], tmp_path: Path) -> None:
    assert _ended_with(lines, tmp_path).endswith(f": {NO_ROOM} (log: {tmp_path / 'ranks.log'})")


def test_a_lost_peer_is_said_where_there_is_no_more_to_say(tmp_path: Path) -> None:
    assert PEER_LOST in _ended_with([PEER_LOST], tmp_path)


def _ended_with(lines: list[str], folder: Path) -> str:
    said = folder / "said"
    said.write_text("\n".join(lines) + "\n")
    child = ChildProcess(
        "ranks", ["sh", "-c", f"cat {said}; exit 1"], log=folder / "ranks.log", env={}
    )
    child.start()
    try:
        with pytest.raises(ChildError) as caught:
            child.wait_until_ready(lambda: False, timeout_s=30)
    finally:
        child.stop()
    return str(caught.value)


def test_the_cause_of_an_end_is_found_among_json_lines(tmp_path: Path) -> None:
    program = "from tracegrad.log_format import *; write_json_log('rank'); {}['gone']"
    child = ChildProcess("ranks", [sys.executable, "-c", program], log=tmp_path / "log", env={})
    child.start()
    try:
        with pytest.raises(ChildError, match="exited with 1: KeyError: 'gone'"):
            child.wait_until_ready(lambda: False, timeout_s=30)
    finally:
        child.stop()
    assert [json.loads(line)["level"] for line in child.log.read_text().splitlines()] == [
        "CRITICAL"
    ]


def test_lines_that_only_look_like_an_error_are_none() -> None:
    assert traceback_errors(["no Error: here", "1Error: x", "a b.Error: x", "=====Error"]) == []


@pytest.mark.usefixtures("_rank_without_a_parent")
def test_a_rank_without_memory_says_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    def work(stack: ExitStack, stop: StopFlag) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 9.15 GiB"
            " of which 1.31 GiB is free. Process 7 has 63.20 GiB memory in use. Of the allocated"
        )

    said: list[str] = []
    assert run_as_rank(work, failed=said.append) == 1
    assert said[0].startswith(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 9.15 GiB of"
        " which 1.31 GiB is free; try fsdp.gradient_checkpointing = true"
    )
    [line] = traceback_errors(capsys.readouterr().err.splitlines())
    assert line == f"OutOfMemoryError: {said[0]}"


@pytest.fixture
def _rank_without_a_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process must neither end with whoever started the tests nor change its signals."""
    for name in ("die_with_parent", "configure_logging", "set_private_umask"):
        monkeypatch.setattr(f"tracegrad_trainer.rl.rank_main.{name}", lambda *_: None)
    monkeypatch.setattr(StopFlag, "listen", lambda _: None)


@pytest.mark.usefixtures("_rank_without_a_parent")
def test_a_rank_says_why_it_ends_before_it_leaves_its_peers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its peers end as soon as it has left them, and the launcher then ends this one."""
    order: list[str] = []

    def work(stack: ExitStack, stop: StopFlag) -> None:
        stack.callback(lambda: order.append(f"left after {capsys.readouterr().err!r}"))
        raise OSError("No space left on device")

    assert run_as_rank(work, failed=order.append) == 1
    assert order == ["No space left on device", "left after 'OSError: No space left on device\\n'"]
    assert capsys.readouterr().err == "", "once"


@pytest.mark.usefixtures("_rank_without_a_parent")
def test_a_rank_whose_end_fails_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def close() -> None:
        raise ValueError("not closed")

    said: list[str] = []
    assert run_as_rank(lambda stack, _: stack.callback(close) and None, failed=said.append) == 1
    assert (said, capsys.readouterr().err) == (["not closed"], "ValueError: not closed\n")
