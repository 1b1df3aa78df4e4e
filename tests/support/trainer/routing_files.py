"""Routed experts as files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray


def routing_file(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def experts_of(
    tokens: int,
    *,
    layers: int = 3,
    k: int = 2,
    experts: int = 256,
    kind: str = "|u1",
    seed: int = 0,
) -> bytes:
    """[tokens, layers, k]; each layer has favourites of its own."""
    chance = np.random.default_rng(seed)
    liked = chance.normal(size=(layers, experts))
    scores = liked + chance.gumbel(size=(tokens, layers, experts))
    return routing_file(np.argsort(-scores, axis=-1)[..., :k].astype(kind))
