"""Whether ranks on several hosts have one folder, and not each one of its own of the same name."""

from __future__ import annotations

import socket
from pathlib import Path

import torch.distributed as dist

from tracegrad.events import new_id
from tracegrad.private_files import private_file, private_folder
from tracegrad_trainer.utils.distributed import run_on_rank_zero


def check_shared_folder(folder: Path, field: str) -> None:
    """That every rank sees what rank 0 writes into `folder`, which the setting `field` names. A
    collective.

    Raises:
        ValueError: some do not; on every rank.
    """
    if dist.get_world_size() == 1:
        return

    def write() -> Path:
        note = private_folder(folder) / f".shared-{new_id()}"
        private_file(note)
        return note

    note = run_on_rank_zero(write)
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, None if note.exists() else socket.gethostname())
    run_on_rank_zero(lambda: note.unlink(missing_ok=True))
    blind = [f"rank {rank} ({host})" for rank, host in enumerate(hosts) if host is not None]
    if blind:
        raise ValueError(
            f"{field}: {folder} is not one folder for all ranks: what rank 0 writes there is not"
            f" seen by {', '.join(blind)}; mount one shared folder under this path on every host"
        )
