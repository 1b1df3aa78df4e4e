"""Tokens of a micro-batch in float64, made by hand: what is not said is as in one whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tracegrad_trainer.objectives import Tokens


def tokens(
    logp: Sequence[float],
    old: Sequence[float] | None = None,
    mu: Sequence[float] | None = None,
    advantage: Sequence[float] | None = None,
    turn: Sequence[int] | None = None,
    row: Sequence[int] | None = None,
    rollout: Sequence[int] | None = None,
    group: Sequence[int] | None = None,
    version: Sequence[int] | None = None,
    expert: Sequence[bool] | None = None,
    score: Sequence[float] | None = None,
    pair: Sequence[int] | None = None,
    label: Sequence[int] | None = None,
    **more: Any,
) -> Tokens:
    """`turn` defaults to one turn, `row` and `rollout` to one row of it, `group` to one group."""
    n = len(logp)
    turns, rows = _whole(turn, n), _whole(row, n)
    rollouts, groups = _whole(rollout if rollout is not None else row, n), _whole(group, n)
    count = _count(rows)
    return Tokens(
        logp=_floats(logp).requires_grad_(),
        old=_floats(old or logp),
        mu=_floats(mu or old or logp),
        advantage=_floats(advantage or [1.0] * n),
        score=_floats(score or [0.0] * n),
        version=_whole(version, n, 1),
        expert=torch.tensor(expert or [False] * n, dtype=torch.bool),
        turn=turns,
        row=rows,
        rollout=rollouts,
        group=groups,
        turns=_count(turns),
        rows=count,
        rollouts=_count(rollouts),
        groups=_count(groups),
        turn_tokens=_sizes(turns),
        rollout_tokens=_sizes(rollouts),
        pair=_whole(pair, count, -1),
        label=_whole(label, count),
        **{k: _floats(v) if isinstance(v, list | float) else v for k, v in more.items()},
    )


def _floats(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _whole(values: Sequence[int] | None, n: int, default: int = 0) -> Tensor:
    return torch.tensor([default] * n if values is None else list(values), dtype=torch.int64)


def _count(numbers: Tensor) -> int:
    return int(numbers.max()) + 1 if len(numbers) else 0


def _sizes(numbers: Tensor) -> Tensor:
    return torch.bincount(numbers)[numbers].double() if len(numbers) else _floats([])
