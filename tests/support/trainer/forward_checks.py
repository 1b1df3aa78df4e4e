"""A model's log-probabilities and gradients, packed beside each row alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from support.trainer.row_samples import rows
from tracegrad_trainer.batches import Row

# Long ones beside short ones, and one that is shorter than any window.
ROWS = [*rows(4), *rows(2, seed=1, longest=13), *rows(1, seed=2, longest=100)]


def alone(model: nn.Module, row: Row) -> Tensor:
    """Log-probabilities of a row's targets by the plainest means: one row, all logits."""
    ids = torch.from_numpy(row.input_ids).long()[None]
    logits = model(input_ids=ids, use_cache=False).logits[0].double()
    logits = logits[:-1] / torch.from_numpy(row.temperature[1:, None])
    chosen = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return chosen[torch.from_numpy(row.keep[1:])]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def agree(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Of each parameter; by the largest entry, as some are small throughout."""
    assert list(found) == list(expected)
    for name, one in found.items():
        apart = (one - expected[name]).abs().max()
        assert apart <= tolerance * expected[name].abs().max() + 1e-9, name
