"""A `SleepingEngine` whose workers receive weights by broadcast, in a real group over gloo."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from support.trainer.sleeping_engine import Refused, SleepingEngine
from tracegrad_trainer.inference.transfer_group import (
    GroupAddress,
    TransferError,
    TransferGroup,
    join_group,
)
from tracegrad_trainer.inference.weight_buckets import TensorSpec, receive


class BroadcastEngine(SleepingEngine):
    """Each worker is a thread. `leaves_after`: buckets after which the last of them ends, once."""

    def __init__(self, workers: int = 2) -> None:
        super().__init__()
        self.workers = workers
        self.groups: dict[int, TransferGroup] = {}
        self.joined = 0
        self.leaves_after = sys.maxsize
        self.version: str = "default"
        self.received: list[dict[str, Tensor]] = []  # by each worker, in the last update

    def start_again(self) -> None:
        """As somebody's supervisor starts it, with the weights of its folder."""
        self.close_groups()
        self.version = "default"

    def close(self) -> None:
        self.close_groups()
        super().close()

    def close_groups(self) -> None:
        for group in self.groups.values():
            group.close()
        self.groups = {}

    def get_world_size(self, query: dict[str, str], body: dict[str, Any]) -> dict[str, int]:
        return {"world_size": self.workers}

    def weight_info(self, query: dict[str, str], body: dict[str, Any]) -> dict[str, str]:
        return {"weight_version": self.version}

    def init_weight_transfer_engine(self, query: dict[str, str], body: dict[str, Any]) -> None:
        self.close_groups()
        address = GroupAddress(**body["init_info"])
        self.groups = self._each(lambda rank: join_group(address, rank, torch.device("cpu")))
        self.joined += 1

    def update_weights(self, query: dict[str, str], body: dict[str, Any]) -> None:
        update = body["update_info"]
        if "step" not in update or not self.groups:
            self.state.updating = False
            raise Refused("paths: the update names no files, or this worker is in no group")
        found = self._each(lambda rank: self._receive(rank, update))
        self.received = list(found.values())
        self.state.incoming = [self.received[0]["w"].item()]
        self.loaded += self.state.incoming

    def finish_weight_update(self, query: dict[str, str], body: dict[str, Any]) -> None:
        super().finish_weight_update(query, body)
        self.version = body["weight_version"]

    def _receive(self, rank: int, update: dict[str, Any]) -> dict[str, Tensor]:
        group = self.groups[rank]
        group.announce(update["step"], rank, update["group"])
        found: dict[str, Tensor] = {}
        for i, specs in enumerate(update["buckets"]):
            if i >= self.leaves_after and rank == self.workers:
                self.leaves_after = sys.maxsize
                self.groups.pop(rank).close()
                raise TransferError("killed")
            found |= receive(group, [[TensorSpec(*spec) for spec in specs]])
        return found

    def _each(self, work: Callable[[int], Any]) -> dict[int, Any]:
        ranks = range(1, self.workers + 1)
        with ThreadPoolExecutor(self.workers) as threads:
            done = {rank: threads.submit(work, rank) for rank in ranks}
        try:
            return {rank: future.result() for rank, future in done.items()}
        except TransferError as error:
            self.state.updating = False
            raise Refused(str(error)) from error
