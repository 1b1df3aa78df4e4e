"""One real vLLM for the whole run, serving a tiny Qwen3 with tied embeddings.

Tests that push other weights put the checkpoint's back when they are done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engines.vllm_server import VllmServer, tiny_settings
from support.system.shadowing_modules import write_modules
from support.trainer.tiny_model import save_tiny_model
from tracegrad_trainer.inference.vllm_process import VllmProcess


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def vllm_server(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    settings = tiny_settings(tiny_model_dir, tmp_path_factory.mktemp("vllm") / "vllm.log")
    process = VllmProcess(settings)
    planted = write_modules(tmp_path_factory.mktemp("planted"))
    try:
        with contextlib.chdir(planted):
            process.start()
        process.wait_healthy(timeout=240)
        name = settings.served_model_name
        yield VllmServer(process.url, tiny_model_dir, name, process, planted)
    finally:
        process.stop()
