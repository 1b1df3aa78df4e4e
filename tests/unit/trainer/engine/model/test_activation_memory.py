"""What is computed again in backward; `test_layout_invariance` has the numbers of whole steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.trainer.row_samples import rows
from support.trainer.tiny_models import make
from tracegrad_trainer.batches import micro_batch
from tracegrad_trainer.engine import FsdpSettings
from tracegrad_trainer.engine.model import activation_memory, memory
from tracegrad_trainer.engine.model import compile as compiled
from tracegrad_trainer.engine.model.forward import to_inputs

# Of two blocks: q, k, v, o, gate, up. Nothing behind them needs the last one's result: not again.
PRODUCTS = 2 * 6


class Counted(TorchDispatchMode):
    """Matrix products, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.products += name.startswith(("aten.mm", "aten.addmm"))
        self.attention += "attention" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "products", "attention"),
    [(False, 0, 0), (True, PRODUCTS, 2), ("selective", PRODUCTS // 2, 0)],
)
def test_what_is_computed_again(kind: Any, products: int, attention: int) -> None:
    counts = []
    for setting in (False, kind):
        model: Any = make("qwen3", gradient_checkpointing=setting)
        one = to_inputs(micro_batch(rows(1), [0]), model, torch.device("cpu"))
        given = {name: value for name, value in one.model.items() if name != "logits_to_keep"}
        out = model.base_model(**given).last_hidden_state.sum()
        with Counted() as counted:
            out.backward()
        counts.append((counted.products, counted.attention))
    (plain, none), (found, again) = counts
    assert none == 0
    assert (found - plain, again) == (products, attention)


def test_the_estimate_lies_between() -> None:
    model = make("qwen3")
    kept = [
        memory.estimate_memory(
            model,
            FsdpSettings(device="cpu", gradient_checkpointing=kind),
            ranks=1,
            tokens=4096,
        ).activations
        for kind in (True, "selective", False)
    ]
    assert kept == sorted(kept)
    assert len(set(kept)) == 3


def test_steps_recorded_before_there_was_a_choice_are_read() -> None:
    for kind in (True, False):
        read = FsdpSettings.model_validate({"gradient_checkpointing": kind})
        assert read.gradient_checkpointing is kind


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler: install g\+\+"):
        make("qwen3", compile=True)


def test_routes_and_compile_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"fsdp\.compile and fsdp\.routing = 'r2'"):
        FsdpSettings(compile=True, routing="r2")


class AsKept(torch.autograd.Function):
    """As a graph of inductor's, which refuses in backward what lies otherwise in memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.strides = x.stride()
        return 2 * x

    @staticmethod
    def backward(ctx: Any, of_out: torch.Tensor) -> torch.Tensor:
        [x] = ctx.saved_tensors
        assert x.stride() == ctx.strides
        return of_out * x


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.view(1, 64, 4, 24).transpose(1, 2),  # heads
        lambda x: x[..., 32:64].view(1, 64, 4, 8).transpose(1, 2),  # of a product for q, k and v
        lambda x: x[:, :, :1].expand(1, 64, 24),
    ],
    ids=["plain", "heads", "slice", "expanded"],
)
def test_what_was_offloaded_lies_in_memory_as_before(view: Any) -> None:
    x = torch.randn(1, 64, 96, requires_grad=True)
    kept: Any = AsKept.apply
    if 0 in view(x).stride():  # no kernel asks for such
        kept = torch.square
    block: Any = torch.nn.Identity()
    found = activation_memory._offloaded(block, lambda x: kept(view(x)), x)
    found.sum().backward()
    plain = x.detach().requires_grad_()
    kept(view(plain)).sum().backward()
    assert torch.equal(x.grad, plain.grad)  # type: ignore[arg-type]
