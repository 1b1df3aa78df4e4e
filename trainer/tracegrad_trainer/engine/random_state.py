"""The state of every random number generator of a rank, as one string."""

from __future__ import annotations

import json
import random

import numpy as np
import torch


def capture_rng_state() -> str:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states = {
        "torch": _hex(torch.get_rng_state()),
        "cuda": _hex(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": random.getstate(),
    }
    return json.dumps(states)


def restore_rng_state(text: str) -> None:
    states = json.loads(text)
    torch.set_rng_state(_bytes(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(states["cuda"]))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    version, inner, gauss = states["python"]
    random.setstate((version, tuple(inner), gauss))


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
