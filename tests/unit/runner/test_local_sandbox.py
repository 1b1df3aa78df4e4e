"""Folders of this machine as sandboxes: what is copied, and what is left of them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tracegrad.runner import local_sandbox
from tracegrad.runner.local_sandbox import LocalSandboxes, own_root, remove_tree
from tracegrad.runner.sandbox import SandboxSpec

NOBODY = 65534


@pytest.fixture(autouse=True)
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders are made."""
    made = tmp_path / "temp"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    return made


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


async def test_traces_and_runs_are_no_part_of_the_workspace(tmp_path: Path, temp: Path) -> None:
    """`--workspace .` beside the store: each copy would hold all others' output."""
    given = tmp_path / "given"
    for name in (".tracegrad/run/log", "src/.tracegrad/kept", "file"):
        (given / name).parent.mkdir(parents=True, exist_ok=True)
        (given / name).write_text("x")
    backend = LocalSandboxes()
    sandbox = await backend.start(SandboxSpec(workspace=given))
    assert files(Path(sandbox.folder)) == ["file", "src/.tracegrad/kept"]
    await backend.close()
    assert os.listdir(temp) == []


async def test_an_agent_that_removed_its_folder_is_scored(tmp_path: Path) -> None:
    backend = LocalSandboxes()
    sandbox = await backend.start(SandboxSpec())
    named: Any = {"environ": {}, "timeout_s": None, "output": tmp_path / "log", "marker": "none"}
    for line in ('rm -rf "$PWD"', "test -e answer"):
        end = await sandbox.run(line, **named)
    assert (end.exit_code, end.error) == (1, None)
    await backend.close()


async def test_a_start_that_is_given_up_leaves_no_folder(
    tmp_path: Path, temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread copies on: after the end of all it would make the folder again."""
    copytree, begun, go_on = shutil.copytree, threading.Event(), threading.Event()

    def slow(*given: Any, **named: Any) -> None:
        begun.set()
        go_on.wait(60)
        copytree(*given, **named)

    monkeypatch.setattr(shutil, "copytree", slow)
    (tmp_path / "given").mkdir()
    backend = LocalSandboxes()
    starting = asyncio.create_task(backend.start(SandboxSpec(workspace=tmp_path / "given")))
    await asyncio.to_thread(begun.wait, 60)
    starting.cancel()
    asyncio.get_running_loop().call_later(0.1, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await starting
    await backend.close()
    assert os.listdir(temp) == []


def test_two_runners_that_begin_at_once_do_not_take_each_others_folder(
    temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, looks = fcntl.flock, [True]

    def late(file: int, how: int) -> None:
        """Between a folder's lock being there and being held, another runner looks around."""
        if looks.pop() if looks else False:
            assert local_sandbox.remove_abandoned(temp) == 1
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    root, lock = own_root()
    assert root.is_dir()
    assert local_sandbox.remove_abandoned(temp) == 0
    os.close(lock)


@pytest.fixture
def not_root() -> Iterator[Path]:
    """A folder of who may not do all."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        before = os.geteuid()
        os.chmod(made, 0o777)
        os.seteuid(before or NOBODY)
        try:
            yield Path(made)
        finally:
            os.seteuid(before)


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_folders_that_an_agent_closed_are_removed(not_root: Path, mode: int) -> None:
    (elsewhere := not_root / "elsewhere").mkdir(mode=0o750)
    root = not_root / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").touch()
    (root / "a" / "link").symlink_to(elsewhere)
    for name in ("a/b", "a"):
        (root / name).chmod(mode)
    remove_tree(root)
    assert not root.exists()
    assert elsewhere.stat().st_mode & 0o777 == 0o750
