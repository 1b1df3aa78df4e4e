"""What the fast attentions of a device compute, against exact masked attention in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bench.gpu_check.check import Finding, Machine, in_a_line, judged
from tracegrad_trainer.engine.attention.dispatch import RowAttention
from tracegrad_trainer.engine.attention.masked import ScoreTransform
from tracegrad_trainer.engine.attention.packed import PackedRowAttention
from tracegrad_trainer.engine.attention.tree import TreeRowAttention
from tracegrad_trainer.engine.attention.varlen import VarlenRowAttention

# Of the largest entry: bfloat16 has 8 bits of fraction, and gradients sum over many tokens.
BOUND = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
_LENGTHS = (130, 7, 64, 300, 1, 33)
_HEADS, _GROUPS, _WIDTH = 4, 2, 64
_FORMS = {
    "": ScoreTransform(),
    "window": ScoreTransform(window=20),
    "soft cap": ScoreTransform(softcap=5.0),
    "sinks, window": ScoreTransform(sinks=torch.linspace(-1, 1, _HEADS), window=20),
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """How far a kernel is off, as a share of the largest entry; of output and gradients. `error`:
    why nobody knows."""

    name: str
    output: float = math.inf
    gradients: float = math.inf
    error: str = ""

    def within(self, dtype: torch.dtype) -> bool:
        return max(self.output, self.gradients) <= BOUND[dtype]

    def row(self) -> list[str]:
        if self.error:
            return [self.name, self.error, ""]
        return [self.name, f"{self.output:.1e}", f"{self.gradients:.1e}"]


def kernels(device: torch.device, dtype: torch.dtype) -> list[Kernel]:
    """Those that run there; varlen and flex need CUDA."""
    lengths = list(_LENGTHS)
    plain = TreeRowAttention(_row_ends(), _depths(), lengths, "cpu")
    branches = TreeRowAttention(_forked_ends(), _depths(), lengths, "cpu")
    tried: list[tuple[str, RowAttention, TreeRowAttention]] = [
        ("packed", PackedRowAttention(lengths, device), plain),
        ("tree", TreeRowAttention(_forked_ends(), _depths(), lengths, device), branches),
    ]
    if device.type == "cuda":
        tried.append(("varlen", VarlenRowAttention(lengths, device), plain))
    found = []
    for kind, rows, exact in tried:
        for form, scores in _FORMS.items():
            name = ", ".join(filter(None, (kind, form)))
            try:
                found.append(_compare(name, rows, exact, scores, device, dtype))
            except Exception as error:
                found.append(Kernel(name, error=in_a_line(error)))
    return found


def _compare(
    name: str,
    rows: RowAttention,
    exact: TreeRowAttention,
    scores: ScoreTransform,
    device: torch.device,
    dtype: torch.dtype,
) -> Kernel:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(_LENGTHS)
    shapes = [(1, heads, tokens, _WIDTH) for heads in (_HEADS, _GROUPS, _GROUPS)]
    # Rounded first, so that the two get the same numbers.
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    weights = torch.randn(1, tokens, _HEADS, _WIDTH, generator=generator)

    def run(how: object, to: torch.device, kind: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        inputs = [x.to(to, kind).requires_grad_() for x in given]
        sinks = None if scores.sinks is None else scores.sinks.to(to, kind)
        out: Tensor = how(*inputs, replace(scores, sinks=sinks))  # type: ignore[operator]
        gradients = torch.autograd.grad((out * weights.to(to, out.dtype)).sum(), inputs)
        return out.detach(), list(gradients)

    wanted, wanted_gradients = run(exact.exact, torch.device("cpu"), torch.float32)
    found, found_gradients = run(rows.attend, device, dtype)
    pairs = zip(found_gradients, wanted_gradients, strict=True)
    return Kernel(name, _apart(found, wanted), max(_apart(a, b) for a, b in pairs))


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.float().cpu() - wanted).abs().max() / wanted.abs().max())


def _row_ends() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.repeat(np.cumsum(_LENGTHS), _LENGTHS)


def _forked_ends() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Each row in thirds: the second is a branch that the last does not see."""
    ends, start = _row_ends(), 0
    for length in _LENGTHS:
        third = length // 3
        ends[start + third : start + 2 * third] = start + 2 * third
        start += length
    return ends


def _depths() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([np.arange(length) for length in _LENGTHS])


def check(machine: Machine) -> Finding:
    found = kernels(machine.device, torch.bfloat16)
    rows = [one.row() for one in found]
    wrong = [one.name for one in found if not one.within(torch.bfloat16)]
    said = f"{len(found)} forms of attention" + (f", wrong: {'; '.join(wrong)}" if wrong else "")
    return judged(not wrong, said, ("attention", "output off", "gradients off"), rows)
