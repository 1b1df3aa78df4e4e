"""What parts return, looked at where it comes in: shapes and types, which no device waits for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_per_token(kind: str, name: str, value: Any, n: int | None) -> Tensor:
    """`value`, if it is one floating-point number a token (`n` None: one altogether).

    Raises:
        ValueError: it is something else.
    """
    shape = "a scalar" if n is None else f"shape ({n},)"
    _check(kind, name, value, () if n is None else (n,), f"a float tensor, {shape}")
    if not value.is_floating_point():
        raise ValueError(f"{kind} {name!r} must return a float tensor, not {value.dtype}")
    assert isinstance(value, Tensor)
    return value


def check_losses_and_mask(kind: str, name: str, value: Any, n: int) -> tuple[Tensor, Tensor]:
    """`value`, if it is (one number a token, one truth a token). Raises as `returned`."""
    numbers, truths = _two(kind, name, value, "(numbers [n], bool[n])")
    check_per_token(kind, name, numbers, n)
    _check(kind, name, truths, (n,), f"a bool tensor of shape ({n},) as its second value")
    if truths.dtype is not torch.bool:
        raise ValueError(f"{kind} {name!r} must return bool as its second value: {truths.dtype}")
    return numbers, truths


def check_shares_and_units(kind: str, name: str, value: Any, n: int) -> tuple[Tensor, Tensor]:
    """`value`, if it is (one number a token, one altogether). Raises as `returned`."""
    shares, units = _two(kind, name, value, "(shares [n], units)")
    return check_per_token(kind, name, shares, n), check_per_token(kind, name, units, None)


def _two(kind: str, name: str, value: Any, wanted: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError(f"{kind} {name!r} must return {wanted}, not {_said(value)}")
    return value


def _check(kind: str, name: str, value: Any, shape: tuple[int, ...], wanted: str) -> None:
    if not isinstance(value, Tensor) or value.shape != shape:
        raise ValueError(f"{kind} {name!r} must return {wanted}, not {_said(value)}")


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
