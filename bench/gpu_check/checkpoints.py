"""A checkpoint of this device's learner: how long training waits for the copy, how long the disk
takes, and that what is loaded is what was saved. And the folder that it is exported to."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.gpu_check.check import Finding, Machine, judged
from bench.gpu_check.models import LARGE, TINY, random_rows
from bench.gpu_check.speed import our_learner
from tracegrad_trainer.batches import pack
from tracegrad_trainer.engine import (
    Learner,
    destroy_process_group,
    full_tensors,
    load_checkpoint,
)
from tracegrad_trainer.engine.checkpoint.hf_export import save_hf
from tracegrad_trainer.engine.checkpoint.save_load import CheckpointSaver

# Of a log-probability in bfloat16, the median over a thousand tokens.
EXPORT_BOUND = 0.02
# A step whose log-probabilities move by far more than that, so that weights of before would show.
EXPORT_LR = 1e-3
# Of a step that is repeated, by kernels that add in any order; without the optimizer's moments
# most of it is off.
STEP_BOUND = 0.1


def check_saved(machine: Machine) -> Finding:
    size = TINY if machine.tiny else LARGE
    made = random_rows(size.rows, size.config["vocab_size"])
    # Of the same rows a second step is the first one's, with moments or without.
    halves = (made[::2], made[1::2])
    first, second = (pack(half, ranks=1, budget=size.budget)[0] for half in halves)
    root = machine.folder / "checkpoints"
    shutil.rmtree(root, ignore_errors=True)
    try:
        learner = our_learner(size, machine)
        learner.train(first, version=0)
        saver = CheckpointSaver(root)
        rows = []
        for number in (1, 2):  # the second finds its buffers there
            machine.wait()
            began = time.perf_counter()
            folder = saver.start(learner, number, {})
            copied = time.perf_counter() - began
            saver.wait()
            took = time.perf_counter() - began
            bytes_ = sum(file.stat().st_size for file in folder.iterdir())
            rows.append([f"{number}.", f"{copied:.2f}", f"{took:.2f}", f"{bytes_ / 2**30:.2f}"])
        saved = _weights(learner)
        learner.train(second, version=0)
        stepped = _weights(learner)
        load_checkpoint(learner, folder)
        loaded = _weights(learner)
        learner.train(second, version=0)
        # What the step is beyond the weights: the optimizer's moments, and its step's number.
        off = _apart(_weights(learner), stepped, saved)
    finally:
        destroy_process_group()
        shutil.rmtree(root, ignore_errors=True)
    same = all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    weights = "equal" if same else "DIFFER"
    said = f"weights {weights}, the step behind it {off:.1e} of itself off (bound {STEP_BOUND:.0e})"
    header = ("checkpoint", "training waits, s", "whole, s", "GiB")
    return judged(same and off <= STEP_BOUND, said, header, rows)


def _weights(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in full_tensors(learner.model)}


def _apart(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> float:
    """How far from where a step should have come, as a share of the step."""
    off = sum(float((found[name] - wanted[name]).square().sum()) for name in start)
    size = sum(float((wanted[name] - start[name]).square().sum()) for name in start)
    return math.sqrt(off / max(size, 1e-30))


def check_export(machine: Machine) -> Finding:
    """Log-probabilities of the exported folder in plain transformers."""
    size = TINY if machine.tiny else LARGE
    made = random_rows(size.rows[-2:], size.config["vocab_size"])
    (batches,) = pack(made, ranks=1, budget=size.budget)
    out = machine.folder / "export"
    try:
        learner = our_learner(size, machine, lr=EXPORT_LR)
        [before] = [found.cpu() for found in learner.logprobs(batches)]
        learner.train(batches, version=0)
        [ours] = [found.cpu() for found in learner.logprobs(batches)]
        save_hf(learner.model, out)
        model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
        model.to(machine.device)
        theirs: list[torch.Tensor] = []
        for row in batches[0].row_keys.tolist():  # in the batch's order
            ids = torch.from_numpy(made[row].input_ids).long().to(machine.device)
            with torch.no_grad():
                logp = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
            theirs.append(logp.gather(-1, ids[1:, None])[:, 0].cpu())
    finally:
        destroy_process_group()
        shutil.rmtree(out, ignore_errors=True)
    gap = (torch.cat(theirs) - ours).abs()
    moved = float((ours - before).abs().median())
    said = f"median {gap.median():.1e}, largest {gap.max():.1e} nats over {len(gap)} tokens"
    said += f", which a step had moved by {moved:.1e}"
    right = float(gap.median()) <= EXPORT_BOUND < moved
    return judged(right, said, (), [])
