"""What each rank does in `test_m2n_push`: vLLM's trainer side of `nccl_m2n`, in the host's memory.

`nccl.m2n` and the communicator are stood in for; `<folder>/<model>-<replicas>.json` gets what the
reshards would have brought together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from vllm.distributed.weight_transfer import m2n_trainer
from vllm.distributed.weight_transfer.m2n_engine import M2NWeightTransferInitInfo

from tracegrad_trainer.engine import as_hf_tensors, full_tensors
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.distributed import sharding_mesh
from tracegrad_trainer.engine.model.parallelize import build_sharded
from tracegrad_trainer.inference.control_routes import EngineLostError
from tracegrad_trainer.inference.m2n_push import M2nOrder, M2nSender
from tracegrad_trainer.inference.m2n_source import LearnerSource

WORKERS = 4
CPU = torch.device("cpu")


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for name in names:
        for replicas in (1, 2):
            mesh = sharding_mesh(ranks, replicas)
            settings = FsdpSettings(device="cpu", replicas=replicas)
            seen = pushed(build_sharded(folder / name, mesh, settings))
            if dist.get_rank() == 0:
                (folder / f"{name}-{replicas}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def pushed(model: torch.nn.Module) -> dict[str, Any]:
    beside = [("vision.w", torch.arange(6).reshape(2, 3).bfloat16())]
    source = LearnerSource(model, torch.bfloat16, CPU, lambda: beside)
    sender = M2nSender(source, CPU, 60.0)
    client, sent = _Client(), list[tuple[Tensor, Any, Any]]()
    with _host_memory(sent):
        order = M2nOrder("127.0.0.1", 1, dist.get_world_size() + WORKERS, (2, 2))
        sender.take_part(order, client)
        for _ in range(2):  # a second push by the same plan
            sent.clear()
            sender.take_part(M2nOrder(), client)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sent)
    metas = source.metadata()
    wanted = {
        name: tensor.bfloat16() if tensor.ndim >= 2 else tensor
        for name, tensor in [*as_hf_tensors(model, full_tensors(model)), *beside]
    }
    wrong = []
    for index, meta in enumerate(metas):
        found = assembled([one[index] for one in everyone])
        if meta.dtype != found.dtype or not torch.equal(found, wanted[meta.name]):
            wrong.append(meta.name)
    sharded = sum(meta.placements is not None for meta in metas)
    names = [meta.name for meta in metas]
    return {
        "wrong": wrong,
        "names": sorted(names) == sorted(wanted),
        "sharded": [meta.name for meta in metas if meta.placements is not None],
        "whole": len(metas) - sharded,
        "parsed": client.parsed,
        "updates": client.updates == [{"names": names}] * 2,
        "failure": failure(sender),
    }


def assembled(pieces: list[tuple[Tensor, Any, Any]]) -> Tensor:
    """By the meshes and placements with which it was sent."""
    _, mesh, placements = pieces[0]
    [axis] = [i for i, code in enumerate(placements) if code is not None]
    parts: dict[int, Tensor] = {}
    for rank, (shard, *same) in enumerate(pieces):
        assert same == [mesh, placements]
        place = (rank // mesh[1], rank % mesh[1])[axis]
        assert place not in parts or torch.equal(parts[place], shard), "copies differ"
        parts[place] = shard
    return torch.cat([parts[place] for place in sorted(parts)], placements[axis])


def failure(sender: M2nSender) -> str:
    def fail() -> None:
        raise RuntimeError("NCCL says no")

    sender._engine = SimpleNamespace(send_weights=fail)
    try:
        sender.take_part(M2nOrder())
    except EngineLostError as error:
        return str(error)
    return ""


class _Client:
    """vLLM's server, which parses what it is sent."""

    def __init__(self) -> None:
        self.parsed: dict[str, Any] = {}
        self.updates: list[Any] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        found = M2NWeightTransferInitInfo(**json.loads(json.dumps(init_info)))
        self.parsed = {
            "offset": found.rank_offset,
            "source": list(found.src_mesh_dims),
            "destination": list(found.dst_mesh_dims),
        }

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.updates.append(update_info)

    def finish_weight_update(self) -> None:
        pass


@contextmanager
def _host_memory(sent: list[tuple[Tensor, Any, Any]]) -> Iterator[None]:
    def reshard(shard: Tensor, into: None, *_: Any, **plan: Any) -> None:
        assert into is None
        sent.append((shard.clone(), plan["src_mesh"], plan["src_placements"]))

    stand_in = SimpleNamespace(
        Handle=SimpleNamespace(create=lambda config: object()),
        Config=lambda max_cta: None,
        Mesh=lambda dims, start_rank: tuple(dims),
        Replicate=lambda: None,
        Shard=lambda dim: dim,
        reshard=reshard,
    )
    stream = SimpleNamespace(synchronize=lambda: None)
    group = SimpleNamespace(comm=1)
    with (
        patch.object(m2n_trainer, "import_m2n", lambda: stand_in),
        patch.object(m2n_trainer, "trainer_init", lambda info, rank: group),
        patch.object(
            m2n_trainer, "publish_destination_placements", lambda *plan: [None] * plan[-1]
        ),
        patch.object(torch.cuda, "current_stream", lambda: stream),
        patch.object(Tensor, "record_stream", lambda self, stream: None),
    ):
        yield
