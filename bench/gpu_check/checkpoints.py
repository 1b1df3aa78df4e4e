"""A checkpoint of this device's learner: how long training waits for the copy, how long the disk
takes, and that what is loaded is what was saved. And the folder that it is exported to."""

from __future__ import annotations

import shutil
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.gpu_check.check import Finding, Machine, judged
from bench.gpu_check.models import LARGE, TINY, random_rows
from bench.gpu_check.speed import our_learner
from tracegrad_trainer.batches import pack
from tracegrad_trainer.engine import destroy_process_group, full_tensors, load_checkpoint
from tracegrad_trainer.engine.checkpoint.hf_export import save_hf
from tracegrad_trainer.engine.checkpoint.save_load import CheckpointSaver

# Of a log-probability in bfloat16, the median over a thousand tokens.
EXPORT_BOUND = 0.02


def check_saved(machine: Machine) -> Finding:
    size = TINY if machine.tiny else LARGE
    (batches,) = pack(
        random_rows(size.rows, size.config["vocab_size"]), ranks=1, budget=size.budget
    )
    root = machine.folder / "checkpoints"
    shutil.rmtree(root, ignore_errors=True)
    try:
        learner = our_learner(size, machine)
        learner.train(batches, version=0)
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
        saved = {name: tensor.cpu().clone() for name, tensor in full_tensors(learner.model)}
        again = learner.train(batches, version=0).metrics["loss"]
        load_checkpoint(learner, folder)
        same = all(torch.equal(t.cpu(), saved[name]) for name, t in full_tensors(learner.model))
        repeated = learner.train(batches, version=0).metrics["loss"]
    finally:
        destroy_process_group()
        shutil.rmtree(root, ignore_errors=True)
    weights = "equal" if same else "DIFFER"
    said = f"weights {weights}, the loss of the step behind it {again:.6g}, then {repeated:.6g}"
    right = same and abs(again - repeated) <= 1e-3 * max(abs(again), 1e-3)
    return judged(right, said, ("checkpoint", "training waits, s", "whole, s", "GiB"), rows)


def check_export(machine: Machine) -> Finding:
    """Log-probabilities of the exported folder in plain transformers."""
    size = TINY if machine.tiny else LARGE
    made = random_rows(size.rows[-2:], size.config["vocab_size"])
    (batches,) = pack(made, ranks=1, budget=size.budget)
    out = machine.folder / "export"
    try:
        learner = our_learner(size, machine)
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
    said = f"median {gap.median():.1e}, largest {gap.max():.1e} nats over {len(gap)} tokens"
    return judged(float(gap.median()) <= EXPORT_BOUND, said, (), [])
