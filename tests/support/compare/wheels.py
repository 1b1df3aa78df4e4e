"""The source of a package's wheel, unpacked and never imported: most peers want CUDA builds or a
newer Python. Fetched once, into a cache that all checkouts share."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TIMEOUT_S = 300.0
PYTHON = "3.12"  # the oldest that all of them take


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "tracegrad-tests" / "compare"


def wheel_source(name: str, version: str) -> Path:
    """The folder of exactly this version; CalledProcessError where the registry has none."""
    folder = cache() / f"{name}-{version}"
    if folder.is_dir():
        return folder
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as draft:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", draft]
        command += ["--only-binary=:all:", "--python-version", PYTHON, f"{name}=={version}"]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        [wheel] = Path(draft).glob("*.whl")
        source = Path(draft) / "source"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(source)
        try:
            source.rename(folder)  # a folder that exists is complete
        except OSError:
            if not folder.is_dir():  # another run was not first either
                raise
    return folder
