"""The real vLLM that integration tests share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tracegrad_trainer.config.vllm import VllmSettings
from tracegrad_trainer.inference.vllm_process import VllmProcess


@dataclass(frozen=True)
class VllmServer:
    url: str
    model_dir: Path
    model: str
    process: VllmProcess
    planted: Path  # the working directory that it was started in


def tiny_settings(
    model_dir: Path, log: Path, *, max_model_len: int = 1024, cache_mib: int = 128
) -> VllmSettings:
    return VllmSettings(
        model=str(model_dir),
        socket=log.with_name("vllm.sock"),
        max_model_len=max_model_len,
        kv_cache_memory_bytes=cache_mib << 20,
        log=log,
    )
