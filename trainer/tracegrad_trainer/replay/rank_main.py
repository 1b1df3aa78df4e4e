"""One rank of a replay on several: `python -m tracegrad_trainer.replay.rank_main JOB`, a file that
`replay` wrote a moment ago. Rank 0 puts what came of it, or the error, beside it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

from tracegrad_trainer.replay.run import ReplayJob, run_on_this_rank
from tracegrad_trainer.rl.rank_main import search_working_folder
from tracegrad_trainer.utils.distributed import launch_rank


def main(arguments: Sequence[str]) -> int:
    search_working_folder()
    path = Path(arguments[0])
    job: ReplayJob = pickle.loads(path.read_bytes())
    try:
        ran = run_on_this_rank(job)
    except (ValueError, OSError) as error:
        if launch_rank() == 0:
            path.with_suffix(".error").write_text(str(error))
        return 1
    if ran:
        partial = path.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(ran))
        partial.rename(path.with_suffix(".result"))  # who waits for it sees it whole
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
