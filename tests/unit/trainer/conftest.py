"""What tests of the training engine share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As much of a model folder as settings look at."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """The process group of this process alone."""
    import torch.distributed as dist  # late: many tests here need no torch

    from tracegrad_trainer.engine import FsdpSettings, destroy_process_group, init_process_group

    init_process_group(FsdpSettings(device="cpu", threads=1))
    yield
    destroy_process_group()
    assert not dist.is_initialized()
