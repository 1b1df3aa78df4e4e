"""What GPUs and memory a machine has: this one's, or one that is described (`8x80GiB`).

GPUs are numbered as nvidia-smi does it (by PCI bus), within CUDA_VISIBLE_DEVICES where that is set.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
_ASK = """
import json, torch
def of(i):
    free, total = torch.cuda.mem_get_info(i)
    return {"index": i, "name": torch.cuda.get_device_name(i), "total": total, "free": free}
print(json.dumps([of(i) for i in range(torch.cuda.device_count())]))
"""
# One of these is there wherever a GPU can be used (NVIDIA's driver, WSL's, ROCm's).
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_DESCRIBED = re.compile(r"(\d+)\s*x\s*(\d+(?:\.\d+)?)\s*GiB", re.IGNORECASE)
_MOST_GPUS, _MOST_GIB = 64, 1024
# Of a described machine's host, where it is not said: what clouds put beside such GPUs.
_HOST_PER_GPU = 2


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory in bytes; `free` is what others have left of `total`."""

    index: int
    name: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Machine:
    """`host`: free bytes of its own memory."""

    gpus: tuple[Gpu, ...]
    host: int


def read_gpus() -> tuple[Gpu, ...]:
    """Those of this machine that may be used, in the order of their numbers.

    Another process asks: a context would hold hundreds of MB of each GPU for as long as its
    process lives, and `trainer serve` lives as long as the run.

    Raises:
        ValueError: there is a GPU, and it does not answer.
    """
    if not any(Path(driver).exists() for driver in _DRIVERS):
        return ()
    asked = subprocess.run(
        [sys.executable, "-c", _ASK],
        env={**os.environ, ORDER: device_order()},
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        lines = asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"]
        raise ValueError(f"gpus: a GPU does not say what memory it has: {lines[-1]}")
    return tuple(Gpu(**found) for found in json.loads(asked.stdout.splitlines()[-1]))


def describe_machine(text: str) -> Machine:
    """`8x80GiB`, or with the host's memory `8x80GiB,1024GiB` -> such a machine, all of it free.

    Raises:
        ValueError: it is no such description.
    """
    gpus, comma, host = (word.strip() for word in text.partition(","))
    found = _DESCRIBED.fullmatch(gpus)
    beside = re.fullmatch(r"(\d+(?:\.\d+)?)\s*GiB", host, re.IGNORECASE)
    if found is None or (comma and beside is None):
        raise ValueError(
            f"{text!r} describes no machine: write it as 8x80GiB (number and memory of its GPUs),"
            " or 8x80GiB,1024GiB (and the host's memory)"
        )
    count, each = int(found[1]), float(found[2])
    if not (1 <= count <= _MOST_GPUS and 1 <= each <= _MOST_GIB):
        raise ValueError(
            f"{text!r}: 1 to {_MOST_GPUS} GPUs of 1 to {_MOST_GIB} GiB can be planned for"
        )
    total = int(each * GIB)
    memory = int(float(beside[1]) * GIB) if beside else _HOST_PER_GPU * count * total
    return Machine(tuple(Gpu(i, "described", total, total) for i in range(count)), memory)


def allocator_environment(inherited: dict[str, str] | None = None) -> dict[str, str]:
    """Variables of ranks whose GPU memory other processes open (`push.transport = "ipc"`), as far
    as `inherited`, our environment, has them otherwise: segments that may grow are handed over by
    file descriptors, which the system may refuse between processes of the same user."""
    environment = dict(os.environ) if inherited is None else inherited
    found = {}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        options = environment.get(name, "").split(",")
        kept = [one for one in options if one.partition(":")[0].strip() != "expandable_segments"]
        if len(kept) < len(options):
            found[name] = ",".join(kept)
    return found


def device_environment(
    gpus: Sequence[int], inherited: dict[str, str] | None = None
) -> dict[str, str]:
    """Variables of a child that sees these GPUs and no other; `inherited`: our environment.

    Numbers count within a CUDA_VISIBLE_DEVICES that we were given, which may hold UUIDs.

    Raises:
        ValueError: it does not hold so many.
    """
    environment = dict(os.environ) if inherited is None else inherited
    given = environment.get(VISIBLE)
    if given is None:
        chosen = [str(index) for index in gpus]
    else:
        names = [name.strip() for name in given.split(",") if name.strip()]
        missing = next((index for index in gpus if index >= len(names)), None)
        if missing is not None:
            raise ValueError(
                f"gpus: GPU {missing} is not among the {len(names)} of {VISIBLE} = {given!r}:"
                " numbers count within it, from 0"
            )
        chosen = [names[index] for index in gpus]
    return {VISIBLE: ",".join(chosen), ORDER: device_order(environment)}


def device_order(environment: dict[str, str] | None = None) -> str:
    """Numbers that a user reads off nvidia-smi are meant; CUDA's own order puts fast ones first."""
    return (dict(os.environ) if environment is None else environment).get(ORDER, "PCI_BUS_ID")
