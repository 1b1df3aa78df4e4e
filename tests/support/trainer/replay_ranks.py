"""One recorded step of two ranks, for `test_replay_odd`; started by torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

from support.trainer.step_samples import SEVERAL, train, trainer_settings

if __name__ == "__main__":
    train(trainer_settings(Path(sys.argv[1]), ranks=2, optim=SEVERAL), 1)
