"""The real vLLM that integration tests share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tracegrad_trainer.endpoint.process import VllmProcess, VllmSettings, free_port


@dataclass(frozen=True)
class VllmServer:
    url: str
    model_dir: Path
    model: str
    process: VllmProcess


def tiny_settings(model_dir: Path, log: Path) -> VllmSettings:
    return VllmSettings(
        model=str(model_dir),
        port=free_port(),
        max_model_len=1024,
        kv_cache_memory_bytes=128 << 20,
        log=log,
    )
