"""A disk that a test can fill: a tmpfs of a few MiB.

Root mounts it. For anyone else the whole test runs again, in a user namespace where it may.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_INSIDE = "TRACEGRAD_TEST_IN_NAMESPACE"


@dataclass(frozen=True)
class SmallDisk:
    folder: Path

    @property
    def free(self) -> int:
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize

    @contextmanager
    def filled(self, leave: int = 0) -> Iterator[None]:
        """Full, but for `leave` bytes."""
        filler = self.folder / "filler"
        # Others may fill it meanwhile: between the look and the write.
        with filler.open("wb", buffering=0) as file, _full_is_fine():
            while (space := self.free - leave) > 0:
                file.write(bytes(min(1 << 16, space)))
        try:
            yield
        finally:
            filler.unlink()


@contextmanager
def _full_is_fine() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


@contextmanager
def small_disk(
    request: pytest.FixtureRequest, folder: Path, mib: int
) -> Iterator[SmallDisk | None]:
    """None: the test ran in a namespace, and passed there. Fails where neither way is open."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    refused = subprocess.run(mount, capture_output=True, text=True, check=False)
    if refused.returncode == 0:
        try:
            yield SmallDisk(folder)
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
    elif _INSIDE in os.environ:
        pytest.fail(f"no disk can be mounted in a user namespace: {refused.stderr.strip()}")
    else:
        _again_inside(request, folder.parent)
        yield None


def _again_inside(request: pytest.FixtureRequest, folder: Path) -> None:
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        ["unshare", "-Urm", *pytest_, f"--basetemp={folder / 'inside'}", request.node.nodeid],
        cwd=request.config.rootpath,
        env={**os.environ, _INSIDE: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(
            "this test needs a small disk of its own: run it as root, or where user namespaces"
            f" are allowed\n{done.stdout}{done.stderr}"
        )
