"""What the store and the doctor know of a trainer's checkpoints: the manifest in their folder.

A checkpoint's manifest names each of its files with size and checksum, so the manifest's own
digest stands for the whole checkpoint. A committed step keeps that digest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

MANIFEST_NAME = "counters.json"


def manifest_digest(folder: Path) -> str:
    """SHA-256 of the manifest's bytes, in hex. Raises OSError: it cannot be read."""
    return hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest()
