"""Tar streams into containers and, made by whoever, out of them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tracegrad.runner import tar_stream
from tracegrad.runner.tar_stream import FileOwner, copy_bounded, pack, unpack


def packed(source: Path, name: str, owner: FileOwner, *folders: str) -> list[tarfile.TarInfo]:
    file = io.BytesIO()
    pack(file, source, name, owner, folders)
    with tarfile.open(fileobj=file) as archive:
        return archive.getmembers()


def made(*members: tuple[str, bytes | tarfile.TarInfo]) -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, what in members:
            if isinstance(what, tarfile.TarInfo):
                what.name = name
                archive.addfile(what)
            else:
                member = tarfile.TarInfo(name)
                member.size = len(what)
                archive.addfile(member, io.BytesIO(what))
    file.seek(0)
    return file


def special(kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo()
    member.type, member.linkname = kind, target
    return member


def test_what_goes_in_belongs_to_whom_it_is_for(tmp_path: Path) -> None:
    (tmp_path / "work" / "deep").mkdir(parents=True)
    (tmp_path / "work" / "deep" / "file").write_text("x")
    members = packed(tmp_path / "work", "home/files", FileOwner(1000, 1001), "home")
    assert [member.name for member in members] == [
        *("home", "home/files", "home/files/deep", "home/files/deep/file")
    ]
    assert {(member.uid, member.gid, member.uname) for member in members} == {(1000, 1001, "")}


def test_a_folder_goes_beside_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    assert [member.name for member in packed(tmp_path, ".", FileOwner())] == ["a"]


@pytest.mark.parametrize(("name", "prefix"), [(".", ""), ("work", "work/")])
def test_traces_and_runs_stay_here(tmp_path: Path, name: str, prefix: str) -> None:
    for each in (".tracegrad", "src/.tracegrad"):
        (tmp_path / each).mkdir(parents=True)
        (tmp_path / each / "file").touch()
    names = {member.name for member in packed(tmp_path, name, FileOwner())}
    assert f"{prefix}src/.tracegrad/file" in names
    assert f"{prefix}.tracegrad" not in names
    assert f"{prefix}.tracegrad/file" not in names


def test_a_file_and_a_folder_come_out(tmp_path: Path) -> None:
    unpack(made(("reward.txt", b"1")), tmp_path / "one")
    assert (tmp_path / "one").read_text() == "1"
    unpack(made(("logs", special(tarfile.DIRTYPE)), ("logs/a/b", b"2")), tmp_path / "two")
    assert (tmp_path / "two" / "a" / "b").read_text() == "2"


@pytest.mark.parametrize(
    "hostile",
    [
        ("logs/../../outside", b"x"),
        ("logs/link", special(tarfile.SYMTYPE, "/etc/passwd")),
        ("logs/hard", special(tarfile.LNKTYPE, "/etc/passwd")),
        ("logs/pipe", special(tarfile.FIFOTYPE)),
        ("logs/device", special(tarfile.CHRTYPE)),
    ],
    ids=lambda member: member[0],
)
def test_links_devices_and_ways_out_are_left_there(
    tmp_path: Path, hostile: tuple[str, bytes | tarfile.TarInfo]
) -> None:
    unpack(made(("logs", special(tarfile.DIRTYPE)), hostile, ("logs/ok", b"1")), tmp_path / "in")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        *("in", "in/ok")
    ]


def test_nothing_is_written_through_a_link_that_is_here(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "target").symlink_to(tmp_path / "kept")
    with pytest.raises(OSError, match="symbolic"):
        unpack(made(("reward.txt", b"1")), tmp_path / "target")
    assert (tmp_path / "kept").read_text() == "kept"


def test_a_link_alone_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        unpack(made(("reward.txt", special(tarfile.SYMTYPE, "/x"))), tmp_path / "target")


def test_a_stream_that_is_no_tar_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not a tar"):
        unpack(io.BytesIO(b"x" * 2000), tmp_path / "target")


def sparse() -> io.BytesIO:
    """A head that promises more than there is."""
    member = tarfile.TarInfo("big")
    member.size = 2000
    return io.BytesIO(member.tobuf() + bytes(2048) + bytes(1024))


@pytest.mark.parametrize(
    "too_large",
    [
        lambda folder: copy_bounded([b"x" * 600, b"x" * 600], io.BytesIO()),
        lambda folder: unpack(sparse(), folder / "target"),
    ],
    ids=["stream", "file"],
)
def test_no_more_comes_out_than_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, too_large: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(tar_stream, "MAX_DOWNLOAD", 1000)
    with pytest.raises(OSError, match="more than"):
        too_large(tmp_path)


def test_nor_more_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_stream, "MAX_MEMBERS", 10)
    with pytest.raises(OSError, match="more than 10 files"):
        unpack(made(*((f"logs/{n}", b"") for n in range(11))), tmp_path / "target")
