"""Folders that belong to a process: removed by it, or by the next one if it was killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def scratch_folder(prefix: str, base: Path | None = None) -> Path:
    """A new folder of ours under `base` (default: the folder for temporary files)."""
    base = base or Path(tempfile.gettempdir())
    for folder in base.glob(f"{prefix}-*-*"):
        pid = folder.name.removeprefix(f"{prefix}-").partition("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-", dir=base))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
