"""Log-probabilities and entropy out of hidden states, never holding all logits.

Rows of hidden states are taken in chunks of at most `elements` logits. Where one chunk holds them
all, it is kept for the backward pass; otherwise backward multiplies each chunk again (a fourth
matrix product beside the three that cannot be avoided). So memory is that of two chunks and of
the weight's gradient, whatever the vocabulary x tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

Hidden = Float[Tensor, "rows hidden"]
Weight = Float[Tensor, "vocabulary hidden"]
Bias = Float[Tensor, " vocabulary"]
Logits = Float[Tensor, "rows vocabulary"]
PerRow = Float[Tensor, " rows"]
Column = Float[Tensor, "rows 1"]

# Logits held at a time: 128 MB of float32, or 512 MB where memory is a GPU's.
MAX_LOGIT_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 27}


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model makes of x = hidden @ weight.T + bias: cap * tanh(scale * x / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def apply_(self, x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """In place."""
        if self.scale != 1:
            x.mul_(self.scale)
        if self.cap is not None:
            x.div_(self.cap).tanh_().mul_(self.cap)
        return x


IDENTITY = LogitTransform()


def chunked_logprobs(
    hidden: Hidden,
    weight: Weight,
    bias: Bias | None,
    labels: Int[Tensor, " rows"],
    temperature: PerRow | None,
    *,
    shape: LogitTransform = IDENTITY,
    elements: int | None = None,
    entropy_gradient: bool = False,
) -> tuple[PerRow, PerRow]:
    """log softmax(logits / temperature) at the labels, with gradient, and the entropy in nats, with
    gradient only where `entropy_gradient` asks for it; float32 (float64 of float64 inputs). A
    `temperature` of None is 1 everywhere.

    Matrix products are made in the inputs' type, everything behind them in float32. A gradient of
    the entropy has the logits multiplied again in backward, whatever fits into one chunk.
    """
    most = elements
    if most is None:
        most = MAX_LOGIT_ELEMENTS.get(hidden.device.type, MAX_LOGIT_ELEMENTS["cpu"])
    # hidden, weight and bias first: `backward` counts on it
    apply: Any = _LogProbs.apply
    logp, entropy = apply(hidden, weight, bias, labels, temperature, shape, most, entropy_gradient)
    return logp, entropy


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Hidden,
        weight: Weight,
        bias: Bias | None,
        labels: Int[Tensor, " rows"],
        temperature: PerRow | None,
        shape: LogitTransform,
        elements: int,
        entropy_gradient: bool,
    ) -> tuple[PerRow, PerRow]:
        logp, entropy, log_z = (
            hidden.new_empty(len(hidden), dtype=_exact(hidden)) for _ in range(3)
        )
        chunks = _chunks(len(hidden), len(weight), elements)
        kept: tuple[Tensor, Tensor] | None = None
        for rows in chunks:
            logits = shape.apply_(_product(hidden[rows], weight, bias))
            if temperature is not None:
                logits.div_(temperature[rows, None])
            highest = logits.amax(-1)
            logits.sub_(highest[:, None])
            share = logits.exp()
            total = share.sum(-1)
            log_total = total.log()
            logp[rows] = logits.gather(-1, labels[rows, None])[:, 0] - log_total
            entropy[rows] = log_total - torch.linalg.vecdot(share, logits) / total
            log_z[rows] = log_total + highest
            if len(chunks) == 1 and shape.cap is None and not entropy_gradient:
                kept = share, total
        known = entropy if entropy_gradient else None
        ctx.save_for_backward(hidden, weight, bias, labels, temperature, log_z, known)
        ctx.shape, ctx.chunks, ctx.kept = shape, chunks, kept
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, temperature, log_z, entropy = ctx.saved_tensors
        # What was kept is used up here; another backward would multiply again.
        kept, ctx.kept = ctx.kept, None
        # Of the log-probability, and of the entropy where it has a gradient.
        factor = of_outputs[0] * ctx.shape.scale
        pull = None if entropy is None else of_outputs[1] * ctx.shape.scale
        if temperature is not None:
            factor = factor / temperature
            pull = None if pull is None else pull / temperature
        sums = _Sums(hidden, weight, bias, ctx.needs_input_grad)
        for rows in ctx.chunks:
            if pull is not None:
                here = pull[rows, None], entropy[rows, None]
                heat = None if temperature is None else temperature[rows, None]
                log_p, steepness = _log_shares(
                    hidden[rows], weight, bias, heat, log_z[rows, None], ctx.shape
                )
                slope = _slope_of_both(log_p, labels[rows, None], factor[rows, None], *here)
                slope = slope if steepness is None else slope.mul_(steepness)
            elif kept is not None:
                slope = kept[0].mul_((-factor / kept[1])[:, None])
                slope.scatter_add_(1, labels[:, None], factor[:, None])
            else:
                logits = ctx.shape.apply_(_product(hidden[rows], weight, bias))
                heat = None if temperature is None else temperature[rows, None]
                slope = _slope(logits, heat, log_z[rows, None], labels[rows, None], ctx.shape.cap)
                slope.mul_(factor[rows, None])
            sums.add(rows, slope)
        return *sums.take(), None, None, None, None, None


class _Sums:
    """Gradients of hidden states, weight and bias, as far as they are wanted."""

    def __init__(
        self, hidden: Hidden, weight: Weight, bias: Bias | None, wanted: tuple[bool, ...]
    ) -> None:
        self.inputs = hidden, weight, bias
        self.wanted = wanted
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, rows: slice, slope: Logits) -> None:
        """`slope`: the loss's, by x (see `LogitTransform`)."""
        hidden, weight, _ = self.inputs
        if self.wanted[2]:
            part = slope.sum(0)
            self.bias = part if self.bias is None else self.bias.add_(part)
        slope = slope.to(hidden.dtype)
        if self.hidden is not None:
            torch.mm(slope, weight, out=self.hidden[rows])
        if not self.wanted[1]:
            return
        if self.weight is not None and self.weight.dtype == hidden.dtype:
            self.weight.addmm_(slope.t(), hidden[rows])
        else:
            part = _mm(slope.t(), hidden[rows])
            self.weight = part if self.weight is None else self.weight.add_(part)

    def take(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        _, weight, bias = self.inputs
        return (
            self.hidden,
            _like(weight, self.weight) if self.wanted[1] else None,
            _like(bias, self.bias) if bias is not None and self.wanted[2] else None,
        )


def _slope(
    logits: Logits,
    temperature: Column | None,
    log_z: Column,
    labels: Int[Tensor, "rows 1"],
    cap: float | None,
) -> Logits:
    """(1 at the label - probability) x the slope of the cap; of `logits` in place."""
    steepness = None if cap is None else 1 - (logits / cap).square_()
    if temperature is not None:
        logits.div_(temperature)
    slope = logits.sub_(log_z).exp_().neg_()
    slope.scatter_add_(1, labels, torch.ones_like(labels, dtype=slope.dtype))
    return slope if steepness is None else slope.mul_(steepness)


def _log_shares(
    hidden: Hidden,
    weight: Weight,
    bias: Bias | None,
    temperature: Column | None,
    log_z: Column,
    shape: LogitTransform,
) -> tuple[Logits, Logits | None]:
    """Log-probabilities of the whole vocabulary, and the slope of the cap."""
    logits = shape.apply_(_product(hidden, weight, bias))
    steepness = None if shape.cap is None else 1 - (logits / shape.cap).square_()
    if temperature is not None:
        logits.div_(temperature)
    # What has no share at all must give 0 x a number, not 0 x infinity.
    return logits.sub_(log_z).clamp_(min=-1e4), steepness


def _slope_of_both(
    log_p: Logits, labels: Int[Tensor, "rows 1"], factor: Column, pull: Column, entropy: Column
) -> Logits:
    """factor (1 at the label - p) - pull p (log p + entropy); of `log_p` in place."""
    p = log_p.exp()
    slope = log_p.add_(entropy).mul_(-pull).sub_(factor).mul_(p)
    return slope.scatter_add_(1, labels, factor.to(slope.dtype))


def _chunks(rows: int, vocabulary: int, elements: int) -> list[slice]:
    """Equal slices of as many rows as `elements` hold, one row at least."""
    most = max(1, elements // vocabulary)
    pieces = -(-rows // most)
    size = -(-rows // pieces) if pieces else 0
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size or 1)]


def _product(hidden: Hidden, weight: Weight, bias: Bias | None) -> Logits:
    x = _mm(hidden, weight.t())
    return x if bias is None else x.add_(bias)


def _mm(a: Float[Tensor, "i j"], b: Float[Tensor, "j k"]) -> Float[Tensor, "i k"]:
    """a @ b in their type, the sums in float32 (float64 of float64)."""
    if a.dtype == _exact(a):
        return a @ b
    if a.is_cuda:  # without rounding the sums to bfloat16 in between
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def _exact(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _like(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient.to(parameter.dtype)
