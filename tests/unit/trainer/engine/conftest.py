"""Model folders of the training engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds two tiny models, `model` and `other`; each file of tests has its own."""
    import torch  # late: some tests need no torch

    from support.trainer.row_samples import tiny_model

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "model")
    tiny_model(folder / "other", seed=1)
    return folder
