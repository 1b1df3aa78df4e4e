"""The model learns to write calls, any of them: it knows its tools and no vault."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from .vault import NAMES, PARTS, TOOLS, TURNS
from .words import ID, PAD, asked, new_model, said, save, seen

IGNORED = -100


def warm_start(folder: Path, *, seed: int, steps: int = 80, batch: int = 48) -> Path:
    """Writes the model; by the end its calls are well formed and about uniform."""
    rng = random.Random(f"warm start {seed}")
    model = new_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (steps - step) / (steps / 2))
        input_ids, labels = _batch(rng, batch)
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    save(model, folder)
    return folder


def _batch(rng: random.Random, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(input ids, labels) [count, longest]: calls at random, as if each opened a bolt."""
    rows = [_row(rng) for _ in range(count)]
    longest = max(len(ids) for ids, _ in rows)
    padded = [ids + [ID[PAD]] * (longest - len(ids)) for ids, _ in rows]
    labels = [marks + [IGNORED] * (longest - len(marks)) for _, marks in rows]
    return torch.tensor(padded), torch.tensor(labels)


def _row(rng: random.Random) -> tuple[list[int], list[int]]:
    vault = rng.choice(NAMES)
    ids = asked(f"{vault}0")
    labels = [IGNORED] * len(ids)
    for turn in range(1, rng.randint(1, TURNS) + 1):
        call = said((rng.choice(TOOLS), rng.choice(PARTS)))
        after = seen(f"{vault}{turn}") if turn < TURNS else []
        ids += call + after
        labels += call + [IGNORED] * len(after)
    return ids, labels
