"""Pushes from every rank's shards: what vLLM's `nccl_m2n` is told of them, and what they are.

Real ranks over gloo and vLLM's own trainer side; no NCCL and no GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer import m2n_engine

from support.trainer import m2n_ranks
from support.trainer.ranks import run_on_ranks
from support.trainer.tiny_models import plain
from tracegrad_trainer.inference.transfer_group import TransferError
from tracegrad_trainer.inference.vllm_weight_transfer import SafetensorsWeightTransferEngine

pytestmark = pytest.mark.vllm  # its classes, not its engine
NAMES = ["qwen3", "qwen3_moe"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("m2n")
    for name in NAMES:
        plain(name).save_pretrained(folder / name)
    run_on_ranks(m2n_ranks.main, 2, folder, NAMES)
    return folder


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_shards_make_up_the_model_that_a_push_carries(
    folder: Path, name: str, replicas: int
) -> None:
    """Bit by bit, under the names of its folder, in the dtype that is served."""
    seen = json.loads((folder / f"{name}-{replicas}.json").read_text())
    assert seen["wrong"] == []
    assert seen["names"]
    assert seen["updates"]
    source = [2, 1]  # shards and copies of them, or with HSDP the other way round
    assert seen["parsed"] == {"offset": 2, "source": source, "destination": [2, 2]}
    assert "NCCL says no; ranks and vLLM may wait for each other" in seen["failure"]


def test_attention_is_never_gathered_and_experts_are(folder: Path) -> None:
    dense, mixture = (json.loads((folder / f"{name}-1.json").read_text()) for name in NAMES)
    for seen in (dense, mixture):
        assert "model.layers.0.self_attn.q_proj.weight" in seen["sharded"]
    assert "model.layers.1.mlp.down_proj.weight" in dense["sharded"]
    # They are stacked in the learner, and one by one in the folder.
    assert not any("experts" in name for name in mixture["sharded"])


class Served(nn.Module):
    """`direct` is named and shaped as in the folder; `fused` is not."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(2, 2, bias=False)
        self.direct = nn.Linear(2, 4, bias=False)
        self.direct.weight.weight_loader = m2n_loader()
        self.loaded: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in weights}


def m2n_loader() -> Any:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    return default_weight_loader


def test_a_worker_of_ours_lets_vllms_own_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a plan of its own: into the model's memory what it knows, and what it does not through
    `load_weights`. NCCL is stood in for."""
    sent = {"direct.weight": 7.0, "q.weight": 3.0}
    queue = list(sent.values())

    def reshard(source: None, into: Tensor, *_: Any, **plan: Any) -> None:
        assert source is None
        into.fill_(queue.pop(0))

    stand_in = SimpleNamespace(
        Handle=SimpleNamespace(create=lambda config: SimpleNamespace(destroy=lambda: None)),
        Config=lambda max_cta: None,
        Mesh=lambda dims, start_rank: tuple(dims),
        Replicate=lambda: None,
        Shard=lambda dim: dim,
        reshard=reshard,
    )
    monkeypatch.setattr(m2n_engine, "import_m2n", lambda: stand_in)
    group = SimpleNamespace(comm=1, destroy=lambda: None)
    monkeypatch.setattr(m2n_engine, "worker_init_process_group", lambda info, parallel: group)
    monkeypatch.setattr(
        m2n_engine, "publish_destination_placements", lambda group, first, mine, count: mine
    )
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    parallel = SimpleNamespace(
        pipeline_parallel_size=1, data_parallel_index=0, world_size=1, rank=0
    )
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    model = Served()
    worker = SafetensorsWeightTransferEngine(None, config, torch.device("cpu"), model)
    update = worker.parse_update_info({"m2n": {"names": list(sent)}})
    with pytest.raises(TransferError, match="has no plan of shards"):
        worker.receive_weights(update)
    plan = {
        "master_address": "127.0.0.1",
        "master_port": 1,
        "rank_offset": 2,
        "world_size": 3,
        "src_mesh_dims": [2, 1],
        "dst_mesh_dims": [1, 1],
        "names": list(sent),
        "dtype_names": ["float32", "float32"],
        "shapes": [[4, 2], [2, 2]],
        "src_placements": [[0, -1], None],
    }
    worker.init_transfer_engine(worker.parse_init_info(plan))
    worker.start_weight_update()
    worker.receive_weights(update)
    assert queue == []
    worker.finish_weight_update()
    assert torch.equal(model.direct.weight, torch.full((4, 2), 7.0)), "in its place"
    assert {name: one.unique().item() for name, one in model.loaded.items()} == {"q.weight": 3.0}
    worker.shutdown()
    with pytest.raises(TransferError, match="was started again"):
        worker.receive_weights(update)
