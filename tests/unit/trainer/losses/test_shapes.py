"""The shapes that are written in the numeric path are those of its arrays.

From rows and micro-batches over the forward, the prepass and attention to the losses. jaxtyping
checks them by an import hook, so in a process of its own: here the modules are long since imported
without it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.system.module_environment import environment

TRAINER = Path(__file__).parents[1]
MODULES = (
    *("batches.micro_batch", "batches.rows"),
    *(f"engine.attention.{name}" for name in ("dispatch", "masked", "packed", "tree", "varlen")),
    *(f"engine.model.{name}" for name in ("chunked_logprobs", "forward", "lm_head", "value_head")),
    *(f"engine.step.{name}" for name in ("accumulate", "epochs", "prepass", "rollout_sums")),
    *(f"losses.{name}" for name in ("aggregation", "corrections", "diagnostics", "gae", "kl")),
    *(f"losses.{name}" for name in ("loss", "ratios", "surrogates", "tokens")),
)
PACKAGES = ",".join(f"tracegrad_trainer.{module}" for module in MODULES)
# Of every file what one pass over its modules needs. What is compiled cannot be checked.
FILES = {
    "losses/test_presets.py": "evaluates",
    "losses/test_ratios.py": "by_hand",
    "losses/test_terms.py": "by_hand",
    "engine/model/test_chunked_logprobs.py": "full_logits or frozen",
    "engine/attention/test_packed.py": "packed_equals or repeated_keys",
    "engine/attention/test_tree.py": "fork_train_alike",
    "engine/step/test_prepass.py": "reference_is or kto_z or advantages_follow or mean_0",
    "engine/step/test_epochs.py": "plain_loop or leaves_no_trace",
    "engine/step/test_gae_by_turn.py": "crosses_rows",
    "engine/step/test_rollout_sums.py": "",
}

WRONG = """
from dataclasses import replace
import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from support.trainer.loss_tokens import made
from support.trainer.row_samples import rows
from tracegrad_trainer.batches import micro_batch
from tracegrad_trainer.engine.attention.masked import ScoreTransform, masked_attention
from tracegrad_trainer.engine.model.chunked_logprobs import chunked_logprobs
from tracegrad_trainer.engine.model.forward import TargetContext
from tracegrad_trainer.engine.model.lm_head import _alike
from tracegrad_trainer.engine.step.accumulate import not_finite
from tracegrad_trainer.losses import preset

def refused(function, *given, **named):
    with pytest.raises(TypeCheckError):
        function(*given, **named)

def test_wrong_shapes_are_refused():
    given = made(0)
    refused(replace, given, rollout_logprobs=given.rollout_logprobs[1:])
    refused(replace, given, turn=given.turn.double())
    from tracegrad_trainer.losses.ratios import ratio_to
    refused(ratio_to, given.rollout_logprobs[None], given, preset("grpo"))
    [row] = rows(1)
    refused(replace, row, advantage=row.advantage.astype(np.float64))
    batch = micro_batch([row], [0])
    refused(replace, batch, version=batch.version.astype(np.int32))
    four, five = torch.zeros(4), torch.zeros(5)
    refused(TargetContext, old_logprobs=four, returns=five)
    refused(not_finite, [four[None]])
    hidden, weight = torch.zeros(4, 3), torch.zeros(7, 3)
    refused(chunked_logprobs, hidden, weight, None, torch.zeros(5, dtype=torch.int64), None)
    logits = torch.zeros(1, 2, 7)
    refused(_alike, logits, logits[0], torch.float32)
    refused(_alike, logits, logits.long(), torch.float32)
    heads = torch.zeros(1, 2, 4, 8)
    refused(masked_attention, heads, heads, heads[:, :, 1:], ScoreTransform(), None)
"""


def test_every_part_keeps_the_shapes_that_it_names(tmp_path: Path) -> None:
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text(WRONG)
    chosen = " or ".join(f"({Path(file).stem} and ({of or 'test'}))" for file, of in FILES.items())
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            *("-p", "no:xdist", f"--jaxtyping-packages={PACKAGES},beartype.beartype"),
            *("-k", f"{chosen} or wrong_shapes"),
            *(str(TRAINER / file) for file in FILES),
            str(wrong),
        ],
        env=environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout
