"""Where the files of a push go: where two versions have room."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tracegrad_trainer.inference import weight_directory
from tracegrad_trainer.inference.weight_directory import PREFIX, choose_directory
from tracegrad_trainer.utils.scratch_folder import ScratchFolder

MIB = 1 << 20


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
    """Free MiB by folder; shared memory is one of them, as large as containers have it."""
    sizes = {"shared": 64, "tmp": 1000, "mine": 1000}
    for name in sizes:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(weight_directory, "_SHARED", tmp_path / "shared")
    monkeypatch.setattr(weight_directory.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=sizes[Path(path).name] * MIB)
    )
    return sizes


def test_shared_memory_if_two_versions_have_room_there(free: dict[str, int]) -> None:
    assert choose_directory(None, 32 * MIB).name == "shared"
    assert choose_directory(None, 33 * MIB).name == "tmp"


def test_the_folder_that_was_asked_for_or_none(free: dict[str, int], tmp_path: Path) -> None:
    assert choose_directory(tmp_path / "mine", 500 * MIB).name == "mine"
    with pytest.raises(ValueError, match=r"push.folder: two versions .* 1002 MiB, .*1000 MiB free"):
        choose_directory(tmp_path / "mine", 501 * MIB)
    with pytest.raises(ValueError, match=r"push.folder: .*nowhere cannot be written"):
        choose_directory(tmp_path / "nowhere", 1)


def test_files_of_killed_runs_make_room(
    free: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as large as ours: a run that is started again would find no room for its own."""
    left = tmp_path / "mine" / f"{PREFIX}-killed"
    left.mkdir()
    alive = ScratchFolder(PREFIX, tmp_path / "mine")
    whole = shutil.rmtree

    def removed(path: Path, **options: bool) -> None:
        whole(path, **options)
        free["mine"] += 600

    left.mkdir(exist_ok=True)
    monkeypatch.setattr(shutil, "rmtree", removed)
    assert choose_directory(tmp_path / "mine", 800 * MIB).name == "mine"
    assert alive.path.exists()
    assert not left.exists()
    alive.close()


def test_no_room_anywhere_is_said_with_what_is_free(free: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"shared has 64 MiB free, .*tmp has 1000 MiB free"):
        choose_directory(None, 600 * MIB)
