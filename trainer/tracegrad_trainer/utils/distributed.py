"""What ranks share besides tensors: rank 0's decisions, and one log.

Rank 0 may fail (the store, the engine, a setting) while the others wait in a collective for it.
So what rank 0 does alone runs inside `run_on_rank_zero`: its result, or its error, reaches every
rank, and all of them go on or all of them stop.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from tracegrad.events import new_id
from tracegrad.log_format import LogFormat, inherited_log_format, write_json_log
from tracegrad.private_files import private_file, private_folder

T = TypeVar("T")


class RankZeroError(RuntimeError):
    """Rank 0 failed; the message is rank 0's own line."""


class StopAllRanks(Exception):
    """Rank 0 ends the run, and nothing is wrong: it reaches every rank as what it is."""


def launch_rank() -> int:
    """This process' rank by its launcher's variables, also where there is no process group yet."""
    return int(os.environ.get("RANK", "0"))


class RankFilter(logging.Filter):
    """Below ERROR rank 0 alone writes: what every rank notices is in the log once."""

    def filter(self, record: logging.LogRecord) -> bool:
        return launch_rank() == 0 or record.levelno >= logging.ERROR


def configure_logging(log_format: LogFormat | None = None) -> None:
    """The trainer's log records of this process go to standard error, in the format that is given,
    or else in that of the command that started this process."""
    if (log_format or inherited_log_format()) == "json":
        _write_json()
        return
    handler = logging.StreamHandler()
    handler.addFilter(RankFilter())
    words = f"%(asctime)s %(levelname)s rank {launch_rank()} %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(words))
    logger = logging.getLogger("tracegrad_trainer")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def _write_json() -> None:
    from transformers.utils import logging as transformers_logging  # a rank has it anyway

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    logger = logging.getLogger("tracegrad_trainer")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.INFO)
    write_json_log("rank", RankFilter(), level=logging.WARNING, rank=launch_rank())


def is_rank_zero() -> bool:
    return dist.get_rank() == 0


def run_on_rank_zero(action: Callable[[], T]) -> T:
    """Runs `action` on rank 0; every rank returns its (picklable) result.

    Raises on every rank if it failed: the error itself on rank 0, RankZeroError elsewhere; a
    StopAllRanks on all of them.
    """
    failure: Exception | None = None
    message: list[Any] = [None, None]
    if is_rank_zero():
        try:
            message[0] = action()
        except Exception as error:
            failure = error
            stops = isinstance(error, StopAllRanks)
            message[1] = error if stops else f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(message, src=0)
    if failure is not None:
        raise failure
    if isinstance(message[1], StopAllRanks):
        raise message[1]
    if message[1] is not None:
        raise RankZeroError(message[1])
    result: T = message[0]
    return result


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


def check_same_settings(settings: Mapping[str, object]) -> None:
    """That every rank has the values, JSON's, of rank 0, whatever file and environment it read
    them from. A collective.

    Raises:
        ValueError: some have not; on every rank, and no value is named.
    """
    ranks: list[Any] = [None] * dist.get_world_size()
    digests = {name: _digest(value) for name, value in _fields(settings)}
    dist.all_gather_object(ranks, (socket.gethostname(), digests))
    _, wanted = ranks[0]
    differs = [
        f"{name} of rank {rank} ({host})"
        for rank, (host, found) in enumerate(ranks)
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    if differs:
        raise ValueError(
            f"not the same settings on all ranks: {', '.join(differs)} is not rank 0's; compare the"
            " hosts' settings files and their TRACEGRAD_ variables"
        )


def _fields(table: Mapping[str, object], of: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _fields(value, f"{of}{name}.")
        else:
            yield f"{of}{name}", value


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
