"""Turns with routes in the serving engine's format."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad.events import Turn
from tracegrad_trainer.batches import RoutingLayout

# Of three layers the first has no router; two of six experts a token.
LAYOUT = RoutingLayout(layers=3, routed=(1, 2), experts=6, k=2)


def npy(found: ArrayLike, dtype: Any = np.uint8) -> bytes:
    """[n, layers, k] as vLLM writes it."""
    with io.BytesIO() as file:
        np.save(file, np.asarray(found).astype(dtype), allow_pickle=False)
        return file.getvalue()


def length(turn: Turn) -> int:
    return len(turn.prompt_token_ids) + len(turn.completion_token_ids)


def told(turn: Turn, routes: NDArray[Any], *, start: int = 0, dtype: Any = np.uint8) -> Turn:
    """With what `routes`, of the path's tokens, say of the turn's from `start` on."""
    return replace(turn, routed_experts=npy(routes[start : length(turn) - 1], dtype))


def by_expert(turn: Turn, expert: int, *, start: int = 0) -> Turn:
    """All of its tokens from `start` on went to this expert and the next one, in every layer."""
    choice = [expert, expert + 1]
    return told(turn, np.tile(choice, (length(turn), LAYOUT.layers, 1)), start=start)


def drawn(tokens: int, *, seed: int = 0, layout: RoutingLayout = LAYOUT) -> NDArray[np.int64]:
    """[tokens, layers, k] of different experts each; a layer without a router has zeros."""
    rng = np.random.default_rng(seed)
    shuffled = rng.permuted(np.tile(np.arange(layout.experts), (tokens, layout.layers, 1)), axis=-1)
    found: NDArray[np.int64] = shuffled[..., : layout.k]
    found[:, [i for i in range(layout.layers) if i not in layout.routed]] = 0
    return found
