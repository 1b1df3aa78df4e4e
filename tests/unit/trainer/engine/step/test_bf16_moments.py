"""Chance that rounds moments follows from the step and the place in the whole parameter."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from support.trainer.stand_in_ranks import as_rank
from tracegrad_trainer.engine.distributed import sharding_mesh
from tracegrad_trainer.engine.model.sharded_load import local_index
from tracegrad_trainer.engine.step.bf16_moments import _dither

STEP = torch.tensor(2.5)  # a half of one is a step too


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("shape", [(7, 5), (6, 2, 3), (7,), (3,)])
def test_every_layout_draws_the_same(shape: tuple[int, ...], ranks: int, replicas: int) -> None:
    """Also where shards are of unequal size, and where a rank has none."""
    whole = torch.zeros(shape)
    expected = _dither(whole, STEP)
    seen = torch.zeros(shape, dtype=torch.int64)
    for rank in range(ranks):
        with as_rank(rank, ranks) as every:
            mesh = sharding_mesh(every, replicas)
            placements = [Shard(0)] if replicas == 1 else [Replicate(), Shard(0)]
            shards = whole.chunk(ranks // replicas)
            place = rank % (ranks // replicas)
            local = shards[place] if place < len(shards) else whole[:0]
            parameter = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            found, here = _dither(parameter, STEP), local_index(parameter)
        assert torch.equal(found, expected[here])
        seen[here] += 1
    assert (seen == replicas).all()


def test_no_two_places_and_no_two_steps_draw_the_same() -> None:
    one = torch.zeros(64, 64)
    found = _dither(one, STEP)
    assert found.unique().numel() == found.numel()
    assert not (found == _dither(one, torch.tensor(3.0))).any()
    assert torch.equal(found, _dither(one, STEP))
    # Whichever half of the bits is taken: about as many of either kind, in each bit.
    share = torch.stack([(found >> bit & 1).double().mean() for bit in range(32)])
    assert float((share - 0.5).abs().max()) < 6 * 0.5 / 64
