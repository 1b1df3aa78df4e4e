"""A disk that a test can fill: a tmpfs of a few MiB.

Root mounts it here. Others mount it in a user namespace of their own, which a process holds open;
what is to see it there has to be run with `prefix`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SmallDisk:
    mounted: Path  # where `prefix` commands see it
    seen: Path  # where this process sees it
    prefix: Sequence[str]

    @property
    def free(self) -> int:
        disk = os.statvfs(self.seen)
        return disk.f_bavail * disk.f_frsize

    @contextmanager
    def filled(self, leave: int = 0) -> Iterator[None]:
        """Full, but for `leave` bytes."""
        filler = self.seen / "filler"
        with filler.open("wb", buffering=0) as file:
            while self.free > leave:
                file.write(bytes(min(1 << 16, self.free - leave)))
        try:
            yield
        finally:
            filler.unlink()


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[SmallDisk]:
    """Fails the test, and does not skip it, where neither way is open."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    refused = subprocess.run(mount, capture_output=True, text=True, check=False)
    if refused.returncode == 0:
        try:
            yield SmallDisk(folder, folder, ())
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    inside = ["unshare", "-Urm", "sh", "-c", '"$@" && echo mounted && exec cat', "sh", *mount]
    with subprocess.Popen(
        inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "mounted\n":
            why = f"{refused.stderr.strip()}; {holder.stderr.read().strip()}"
            pytest.fail(
                "this test needs a small disk of its own: run it as root, or where user"
                f" namespaces are allowed ({why})"
            )
        try:
            enter = ["nsenter", "-t", str(holder.pid), "-U", "-m", "--preserve-credentials"]
            yield SmallDisk(folder, Path(f"/proc/{holder.pid}/root{folder}"), enter)
        finally:
            holder.stdin.close()  # `cat` ends, and the namespace with it
