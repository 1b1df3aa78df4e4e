"""A virtual environment that has a wheel, what that requires, and nothing of the tests'."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import httpx

from tracegrad_trainer.utils.network import find_free_port

# Of the tests' own process, these would lead out of the environment, or to another proxy.
_NOT_HANDED_ON = ("PYTHON", "VIRTUAL_ENV", "TRACEGRAD_", "OPENAI_")
_INSTALL_S = 900.0
_START_S = 120.0


@dataclass(frozen=True, slots=True)
class CleanVenv:
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment's, such as `tracegrad`, in the environment's folder."""
        program, *arguments = words
        return subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=self.folder,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
            check=False,
        )

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_HANDED_ON)}
        return {**kept, "TRACEGRAD_JOURNAL": str(self.folder / "journal"), **variables}

    def distributions(self) -> set[str]:
        """Names of what is installed, but pip itself and what pip came with."""
        listed = self.run("python", "-m", "pip", "list", "--format=json")
        names = {entry["name"].lower().replace("_", "-") for entry in json.loads(listed.stdout)}
        return names - {"pip", "setuptools", "wheel"}

    @contextmanager
    def proxy(self, upstream: str) -> Iterator[str]:
        """The URL of this environment's `tracegrad proxy`, with a store in its folder."""
        port = find_free_port()
        log = self.folder / "proxy.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [self.folder / "bin" / "tracegrad", "proxy", f"--port={port}", "--upstream",
                 upstream, f"--store={self.store}"],
                cwd=self.folder, env=self.environment(), stdout=output, stderr=output,
            )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + _START_S
            while not _answers(url):
                waits = process.poll() is None and time.monotonic() < deadline
                assert waits, log.read_text()[-2000:]
                time.sleep(0.05)
            yield url
        finally:
            process.terminate()
            process.wait()

    @property
    def store(self) -> str:
        return f"sqlite:///{self.folder}/store.db"


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def make(
    python: str | Path, folder: Path, requirement: str, *, as_here: Collection[str] = ()
) -> CleanVenv:
    """With `requirement`, such as `tracegrad.whl[proxy]`, installed from the package index;
    `as_here`: distributions in the versions that the tests' own environment has.

    Raises AssertionError, with what venv or pip said.
    """
    made = CleanVenv(folder)
    command = [python, "-m", "venv", folder]
    done = subprocess.run(
        command, env=made.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pins = folder / "constraints.txt"
    pins.write_text("".join(f"{name}=={version(name)}\n" for name in as_here), encoding="utf-8")
    done = made.run(
        "python", "-m", "pip", "install", "--no-input", "--no-compile", "-c", pins, requirement
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return made
