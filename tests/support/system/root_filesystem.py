"""A small root file system made of this machine's own Debian packages, for `docker import`."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import debian_packages

CACHE = Path(__file__).resolve().parents[3] / ".cache" / "docker"
_FOLDERS = ("bin", "dev", "etc", "proc", "root", "run", "sys", "tmp", "usr/bin", "var/tmp")
_FILES = {
    "etc/passwd": "root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/tmp:/bin/sh\n",
    "etc/group": "root:x:0:\nagent:x:1000:\n",
}
_WORLDS_FOLDERS = ("tmp", "var/tmp")
_PARTS_OF_LIBC = ("dl.so.2", "m.so.6", "pthread.so.0", "rt.so.1", "util.so.1")
_BUSYBOX = Path("/bin/busybox")


def archive(*, python: bool = False) -> Path:
    """A tar with busybox and, where asked, Debian's python3 with its standard library."""
    packages = _packages(python=python)
    versions = "_".join(_said("dpkg-query", "-W", "-f", "${Version}", each) for each in packages)
    name = f"{'python' if python else 'busybox'}-{versions.replace('/', '-').replace(':', '-')}.tar"
    path = CACHE / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{name}.{os.getpid()}")
        with tarfile.open(unfinished, "w") as made:
            _write(made, packages[1:])
        unfinished.rename(path)
    return path


def _packages(*, python: bool) -> list[str]:
    if not _BUSYBOX.exists() or b"statically" not in _kind(_BUSYBOX):
        debian_packages.install("busybox-static")
    if not python:
        return ["busybox-static"]
    if not Path("/usr/bin/python3").exists():
        debian_packages.install("python3")
    version = os.path.basename(os.path.realpath("/usr/bin/python3"))
    library = f"lib{version}"
    return [
        *("busybox-static", "python3-minimal", f"{version}-minimal"),
        *(f"{library}-minimal", f"{library}-stdlib"),
        "libgcc-s1",  # modules in Rust load it
    ]


def _kind(program: Path) -> bytes:
    """As `ldd` says it: `not a dynamic executable` or `statically linked`."""
    found = subprocess.run(["ldd", program], capture_output=True, check=False)
    said = found.stdout + found.stderr
    return b"statically" if b"not a dynamic" in said or b"statically" in said else said


def _write(made: tarfile.TarFile, packages: Iterable[str]) -> None:
    for name in _FOLDERS:
        member = tarfile.TarInfo(name)
        member.type = tarfile.DIRTYPE
        member.mode = 0o1777 if name in _WORLDS_FOLDERS else 0o755
        made.addfile(member)
    for name, text in _FILES.items():
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(text), 0o644
        made.addfile(member, io.BytesIO(text.encode()))
    made.add(_BUSYBOX, "bin/busybox")
    taken = {"bin/busybox"}
    for applet in _said(str(_BUSYBOX), "--list").split():
        if applet != "busybox":
            _link(made, f"bin/{applet}", "/bin/busybox")
            taken.add(f"bin/{applet}")
    files = list(_files_of(packages))
    for path in files:
        name = str(path).lstrip("/")
        if name not in taken:
            taken.add(name)
            made.add(path, name, recursive=False)
    libraries = _libraries(files)
    # Parts of libc that Python itself does not load, and other people's modules do.
    for path in [path for path in libraries if path.name == "libc.so.6"]:
        libraries |= {path.with_name(f"lib{part}") for part in _PARTS_OF_LIBC}
    for path in sorted(libraries):
        made.add(path.resolve(), str(path).lstrip("/"))  # the loader looks for the name


def _link(made: tarfile.TarFile, name: str, target: str) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    made.addfile(member)


def _files_of(packages: Iterable[str]) -> Iterator[Path]:
    for package in packages:
        for line in _said("dpkg", "-L", package).splitlines():
            path = Path(line)
            if path.is_symlink() or path.is_file():
                yield path


def _libraries(paths: Iterable[Path]) -> set[Path]:
    """What programs and modules among them load."""
    loading = [path for path in paths if path.suffix == ".so" or path.parent.name == "bin"]
    if not loading:
        return set()
    found = subprocess.run(["ldd", *loading], capture_output=True, text=True, check=False)
    lines = (line.split() for line in found.stdout.splitlines() if line.startswith("\t"))
    return {Path(word) for words in lines for word in words if word.startswith("/")}


def _said(*command: str) -> str:
    assert shutil.which(command[0]) is not None, f"Debian has {command[0]}"
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
