"""The wheel of this checkout, as a user of the package index gets it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    ROOT / "sdk" / "tracegrad",
    ROOT / "trainer" / "tracegrad_trainer",
    ROOT / "integrations" / "tracegrad_integrations",
)


@dataclass(frozen=True, slots=True)
class Distributions:
    sdist: Path
    wheel: Path


def build(folder: Path) -> Distributions:
    """The wheel is built of the unpacked sdist, so that the sdist lacks nothing. Needs no network.

    Raises subprocess.CalledProcessError, whose output has the backend's own words.
    """
    sdist = _build(ROOT, "sdist", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return Distributions(
        sdist, _build(folder / sdist.name.removesuffix(".tar.gz"), "wheel", folder)
    )


def _build(source: Path, target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (made,) = folder.glob("*.tar.gz" if target == "sdist" else "*.whl")
    return made


def files_of_packages() -> set[str]:
    """Every file of the three packages in this checkout, by its path in a wheel."""
    return {
        path.relative_to(package.parent).as_posix()
        for package in PACKAGES
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
