"""Hidden states and a head, and the memory that its log-probabilities take."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tracegrad_trainer.engine.model.chunked_logprobs import (
    IDENTITY,
    LogitTransform,
    chunked_logprobs,
)

HIDDEN = 12


class Case:
    """Random inputs of a head, and full logits by plain autograd."""

    def __init__(
        self, n: int, vocabulary: int, dtype: torch.dtype, *, bias: bool = False, heat: bool = True
    ) -> None:
        made = torch.Generator().manual_seed(n * 1000 + vocabulary)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=made, dtype=torch.float64).to(dtype)

        self.hidden = normal(n, HIDDEN).requires_grad_()
        self.weight = normal(vocabulary, HIDDEN).requires_grad_()
        self.bias = normal(vocabulary).requires_grad_() if bias else None
        self.labels = torch.randint(0, vocabulary, (n,), generator=made)
        self.temperature = torch.rand(n, generator=made) + 0.5 if heat else None
        self.factor = normal(n).float() if dtype is not torch.float64 else normal(n)

    @property
    def parameters(self) -> list[Tensor]:
        return [p for p in (self.hidden, self.weight, self.bias) if p is not None]

    def ours(
        self,
        elements: int | None = None,
        shape: LogitTransform = IDENTITY,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        return chunked_logprobs(
            self.hidden,
            self.weight,
            self.bias,
            self.labels,
            self.temperature,
            shape=shape,
            elements=elements,
            entropy_gradient=entropy_gradient,
        )

    def check_finite_differences(
        self, elements: int | None, shape: LogitTransform, *, entropy_gradient: bool
    ) -> None:
        def found(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
            self.hidden, self.weight, self.bias = hidden, weight, bias
            logp, entropy = self.ours(elements, shape, entropy_gradient=entropy_gradient)
            return (logp, entropy) if entropy_gradient else logp

        # What a second backward multiplies again may differ in the last bit.
        assert torch.autograd.gradcheck(
            found, tuple(self.parameters), rtol=1e-6, atol=1e-8, nondet_tol=1e-12
        )

    def full(
        self, shape: LogitTransform = IDENTITY, dtype: Any = torch.float64
    ) -> tuple[Tensor, Tensor]:
        logits = self.hidden.to(dtype) @ self.weight.to(dtype).T
        if self.bias is not None:
            logits = logits + self.bias.to(dtype)
        logits = logits * shape.scale
        if shape.cap is not None:
            logits = shape.cap * torch.tanh(logits / shape.cap)
        if self.temperature is not None:
            logits = logits / self.temperature.to(dtype)[:, None]
        every = logits.log_softmax(-1)
        entropy = -(every.exp() * every).sum(-1)
        return every.gather(-1, self.labels[:, None])[:, 0], entropy

    def gradients(self, logp: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((logp * self.factor).sum(), self.parameters))


def close(a: Tensor, b: Tensor, bound: float) -> None:
    assert a.shape == b.shape
    a, b = a.detach().double(), b.detach().double()
    assert float((a - b).norm()) <= bound * max(1e-30, float(b.norm()))


class Peak(TorchDispatchMode):
    """The most bytes at a time in tensors that were made within."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(done):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return done

    def _note(self, storage: Any) -> None:
        place = storage._cdata
        if place in self._known:
            return
        self._known.add(place)
        self.live += storage.nbytes()
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self._gone, place, storage.nbytes())

    def _gone(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.live -= size
