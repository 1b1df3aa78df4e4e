"""What tests of the training engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """The process group of this process alone."""
    import torch.distributed as dist  # late: many tests here need no torch

    from tracegrad_trainer.engine import FsdpSettings, destroy_process_group, init_process_group

    init_process_group(FsdpSettings(device="cpu", threads=1))
    yield
    destroy_process_group()
    assert not dist.is_initialized()
