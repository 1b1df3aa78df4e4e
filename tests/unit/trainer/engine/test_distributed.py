"""Which of eight ranks hold a copy of the model together, and which share micro-batches."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from support.trainer.ranks import run_on_ranks
from support.trainer.row_samples import rows
from support.trainer.stand_in_ranks import as_rank
from support.trainer.timeout_ranks import every_group_waits
from tracegrad_trainer.batches import PackingRule
from tracegrad_trainer.engine.config import OptimSettings
from tracegrad_trainer.engine.context_parallel import ContextParallel
from tracegrad_trainer.engine.distributed import destroy_process_group, sharding_mesh
from tracegrad_trainer.engine.step import train_batch as module
from tracegrad_trainer.engine.step.optimizer import copies_of_shards
from tracegrad_trainer.engine.step.train_batch import deal_rows, train_batch


@pytest.mark.parametrize(
    ("replicas", "copies"),
    [
        (2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (8, [[0], [1], [2], [3], [4], [5], [6], [7]]),
    ],
)
def test_neighbours_hold_a_copy_of_the_model_together(
    replicas: int, copies: list[list[int]]
) -> None:
    """They gather weights at each block; copies exchange gradients alone, once a step."""
    with as_rank(0, 8) as ranks:
        mesh = sharding_mesh(ranks, replicas)
        model = fully_shard(nn.Linear(16, 16), mesh=mesh)
        assert mesh.mesh.tolist() == copies
        assert mesh.mesh_dim_names == ("replicate", "shard")
        assert copies_of_shards(model) == replicas


def test_without_copies_all_ranks_have_shards_of_their_own() -> None:
    with as_rank(0, 8) as ranks:
        assert sharding_mesh(ranks, 1) is ranks
        assert copies_of_shards(fully_shard(nn.Linear(16, 16), mesh=ranks)) == 1


@pytest.mark.parametrize(
    ("size", "groups", "beside"),
    [
        (2, [[0, 1], [2, 3], [4, 5], [6, 7]], [1, 3, 5, 7]),
        (4, [[0, 1, 2, 3], [4, 5, 6, 7]], [1, 5]),
    ],
)
def test_neighbours_share_micro_batches_and_are_dealt_the_same(
    size: int, groups: list[list[int]], beside: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`beside`: the ranks that have every micro-batch once, together with rank 1."""
    dealt: list[Any] = []

    def scatter(received: list[Any], shares: list[Any], src: int) -> None:
        dealt[:] = shares
        received[0] = shares[src]

    monkeypatch.setattr(dist, "scatter_object_list", scatter)
    with as_rank(1, 8) as ranks:
        context = ContextParallel.of(ranks, size)
        assert context is not None
        assert context.mesh.mesh.tolist() == groups
        assert dist.get_process_group_ranks(context.data.get_group()) == beside
        assert dist.get_process_group_ranks(context.group) == groups[0]
    with as_rank(0, 8):
        data = SimpleNamespace(size=lambda: 8 // size)
        engine: Any = SimpleNamespace(packing=PackingRule(), data=data)
        _, stats = deal_rows(engine, rows(24), budget=80)
    assert stats["ranks_a_micro_batch"] == size
    of_rank = [[key for one in own for key in one.row_keys.tolist()] for [own], _ in dealt]
    assert all(of_rank[rank] == of_rank[group[0]] for group in groups for rank in group)
    once = [key for group in groups for key in of_rank[group[0]] if key >= 0]
    assert sorted(once) == list(range(24))


class Dealt(Exception):
    """With how many tokens a micro-batch."""


@pytest.mark.parametrize(("shared", "budget"), [(False, 80), (True, 4 * 80)])
def test_ranks_that_share_a_micro_batch_bring_their_budgets_together(
    shared: bool, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[bool] = []

    def sharing_rows(one: bool) -> nullcontext[None]:
        chosen.append(one)
        return nullcontext()

    def deal(*_: object, budget: int) -> None:
        raise Dealt(budget)

    monkeypatch.setattr(module, "run_on_rank_zero", lambda work: work())
    monkeypatch.setattr(module, "_shares_rows", lambda *_, **__: shared)
    monkeypatch.setattr(module, "_deal", deal)
    engine = SimpleNamespace(packing=PackingRule(group=4))
    learner: Any = SimpleNamespace(
        optim=OptimSettings(), steps=0, engine=engine, sharing_rows=sharing_rows
    )
    with pytest.raises(Dealt) as caught:
        train_batch(learner, rows(2), version=0, budget=80)
    assert caught.value.args == (budget,)
    assert chosen == [shared]


@pytest.mark.parametrize(
    ("backend", "ranks", "leaves"),
    [("cpu:gloo,cuda:nccl", 2, False), ("cpu:gloo,cuda:nccl", 1, True), ("cpu:gloo", 2, True)],
)
def test_a_rank_that_failed_waits_for_no_other(
    backend: str, ranks: int, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's end would: the others sit in a collective until it times out."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, partial(calls.append, name))

    def fail() -> None:
        with ExitStack() as stack:
            stack.callback(destroy_process_group)
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        fail()
    assert calls == ["destroy_process_group"] * leaves
    calls.clear()
    destroy_process_group()
    assert calls == ["barrier", "destroy_process_group"]


def test_backends_are_named_as_a_failed_rank_looks_for_them(one_rank: None) -> None:
    assert "gloo" in dist.get_backend_config()


def test_every_group_waits_for_as_long_as_is_set(tmp_path: Path) -> None:
    """torch gives groups beside that of all ranks half an hour."""
    run_on_ranks(every_group_waits, 2, 77.0, tmp_path)
