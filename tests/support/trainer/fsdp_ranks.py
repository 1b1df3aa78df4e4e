"""What each of two ranks does in `test_two_ranks`, once for all tests.

Everything that the tests look at goes into `<folder>/ranks.pt`, written by rank 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from support.trainer.learners import build, save_checkpoint, weights
from support.trainer.row_samples import POISON, rows
from tracegrad_trainer.batches import MicroBatch, Row, pack
from tracegrad_trainer.engine import (
    CheckpointError,
    FsdpSettings,
    Learner,
    destroy_process_group,
    init_process_group,
    list_checkpoints,
    load_checkpoint,
    train_batch,
)
from tracegrad_trainer.engine.checkpoint.hf_export import save_hf
from tracegrad_trainer.engine.step.result import StepResult

VERSION = 3
CLIP = 0.1


def learner(folder: Path, *, reshard: bool = True, dtype: Any = "float32", **optim: Any) -> Learner:
    fsdp = {"reshard": reshard, "compute_dtype": dtype}
    return build(folder, fsdp=fsdp, **({"max_grad_norm": CLIP} | optim))


def share(made: list[Row], budget: int) -> list[MicroBatch]:
    return pack(made, ranks=dist.get_world_size(), budget=budget)[dist.get_rank()]


def step(one: Learner, batches: list[MicroBatch], **changes: Any) -> tuple[StepResult, dict]:  # type: ignore[type-arg]
    """A training step, and the whole gradients the optimizer saw."""
    seen: dict[str, Tensor] = {}
    apply = one.optimizer.step

    def spy() -> None:
        for name, parameter in one.model.named_parameters():
            grad = parameter.grad
            assert grad is not None
            seen[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        apply()

    one.optimizer.step = spy  # type: ignore[method-assign,assignment]
    result = one.train(batches, version=VERSION, **changes)
    one.optimizer.step = apply  # type: ignore[method-assign]
    return result, seen


def poisoned(made: list[Row], number: int) -> list[Row]:
    """The rows, one of them holding a token whose embedding is not a number."""
    made[number].input_ids[1] = POISON
    return made


def main(folder: Path) -> None:
    init_process_group(FsdpSettings(device="cpu", threads=1))
    assert torch.get_num_threads() == 1
    model, out = folder / "model", {}
    made = rows(11)

    one = learner(model)
    out["logprobs"] = logprobs_by_row(one, share(made, 120))
    out["step"] = step(one, share(made, 80))
    out["after"] = weights(one)
    dealt = rows(11) if dist.get_rank() == 0 else None
    out["dealt"] = train_batch(learner(model), dealt, version=VERSION, budget=80)
    out["names"] = list(out["after"])

    save_hf(one.model, folder / "exported", companions_from=model)
    counters = {"step": 1, "version": VERSION}
    for number in (1, 2, 3):
        save_checkpoint(one, folder / "checkpoints", number, counters, keep=2)
    out["kept"] = [path.name for path in list_checkpoints(folder / "checkpoints")]
    out["next"] = step(one, share(made, 80))
    out["next_weights"] = weights(one)
    fresh = learner(folder / "other")
    out["counters"] = load_checkpoint(fresh, folder / "checkpoints" / "step-00000003")
    out["fresh_steps"] = fresh.steps
    out["resumed"] = step(fresh, share(made, 80))
    out["resumed_weights"] = weights(fresh)
    (folder / "a-file").write_text("")
    out["errors"] = [
        error_of(lambda: save_checkpoint(one, folder / "a-file", 1, {}, keep=1)),
        error_of(lambda: load_checkpoint(one, folder / "nowhere")),
    ]

    out["whole"] = step(learner(model, reshard=False), share(made, 80))
    out["one_row"] = step(learner(model), share(made[:1], 80))

    half = learner(model, dtype="bfloat16", max_grad_norm=float("inf"))
    out["half"] = step(half, share(made[:2], 80))
    out["half_dtypes"] = {
        *(one.dtype for one in half.model.parameters()),
        *(one.dtype for kept in half.optimizer.state.values() for one in kept.values()),
    }

    out["without_four"] = step(learner(model), share(made[:4] + made[5:], 80))
    bad = learner(folder / "poisoned")
    out["poisoned"] = step(bad, share(poisoned(rows(11), 4), 80))
    only = learner(folder / "poisoned")
    before = weights(only)
    out["all_poisoned"] = step(only, share(poisoned(rows(1), 0), 80))
    out["untouched"] = [
        torch.equal(a, b)
        for a, b in zip(before.values(), weights(only).values(), strict=True)
        if not a.isnan().any()
    ]
    infinite = learner(model)
    endless = rows(1)
    endless[0].advantage[endless[0].keep] = np.inf
    out["infinite"] = step(infinite, share(endless, 80))

    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, out)
    if dist.get_rank() == 0:
        torch.save(everyone, folder / "ranks.pt")
    destroy_process_group()
    assert not dist.is_initialized()


def logprobs_by_row(one: Learner, batches: list[MicroBatch]) -> dict[int, Tensor]:
    found = {}
    for batch, values in zip(batches, one.logprobs(batches), strict=True):
        for number, key in enumerate(batch.row_keys.tolist()):
            found[key] = values[torch.from_numpy(batch.row == number)]
    return found


def error_of(action: Any) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return "no error"
