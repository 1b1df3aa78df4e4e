"""`torchrun ... meeting_ranks.py FOLDER`: a rank that meets the others, and notes that in FOLDER.

The first time all of them end to be started again, as a rollback ends them. Later they stay, rank 0
outside of collectives, as it is while it waits for rollouts: until FOLDER/notice it does not find
out that others are gone. With FOLDER/end all end well.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tracegrad_trainer.engine import FsdpSettings, destroy_process_group, init_process_group


def main(folder: Path) -> int:
    rank = int(os.environ["RANK"])
    note = folder / f"rank-{rank}"
    add(note, "begun")
    # Who is early finds what the attempt before left in the store.
    time.sleep(float(os.environ.get("LATE_S", "0")))
    init_process_group(FsdpSettings(device="cpu", threads=1, timeout_s=600))
    found = torch.ones(1)
    dist.all_reduce(found)
    assert found.item() == dist.get_world_size()
    dist.barrier()
    add(note, "met")
    if note.read_text().count("met") == 1:
        return os.EX_TEMPFAIL
    while rank == 0 and not any((folder / name).exists() for name in ("notice", "end")):
        time.sleep(0.05)
    dist.barrier()  # the others wait here
    destroy_process_group()
    return 0


def add(note: Path, word: str) -> None:
    with note.open("a") as file:
        print(word, file=file)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)  # whoever ends first aborts nobody
