"""Supervised training of a small model from nothing, for every example's warm start: the steps,
which tokens are labels, and the directory that keeps the result."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from . import model

Progress = Callable[[int, int, float], None]  # steps done, steps in all, loss
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]  # input ids, labels: both [batch, longest]
IGNORED = -100
LABELS_A_TEXT = 25  # on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The model's size and how it is trained."""

    seed: int = 0
    hidden: int = 128
    layers: int = 4
    vocab_size: int = 700
    steps: int = 440
    batch_size: int = 16
    learning_rate: float = 1.5e-3
    warm_up: int = 30
    decay_share: float = 0.5  # the last part of the steps, with linear decay to zero

    def learning_rate_at(self, step: int) -> float:
        rising = (step + 1) / self.warm_up
        falling = (self.steps - step) / (self.steps * self.decay_share)
        return self.learning_rate * min(1.0, rising, falling)

    def digest(self, sources: list[Path], *parts: str) -> str:
        """Identifies what decides the weights: these settings, the code in `sources`, `parts` and
        the libraries."""
        import transformers

        here = Path(__file__).parent
        files = [here / "model.py", here / "supervised.py", *sources]
        all_parts = [
            json.dumps(asdict(self), sort_keys=True),
            *parts,
            *(file.read_text() for file in files),
            torch.__version__,
            transformers.__version__,
        ]
        return hashlib.sha256("\0".join(all_parts).encode()).hexdigest()[:16]


def kept(directory: Path, make: Callable[[], tuple[Any, Any]]) -> Path:
    """`directory`, which is made now unless it is there: `make` gives a tokenizer and a model."""
    if directory.exists():
        return directory
    draft = directory.with_name(f"{directory.name}.draft-{os.getpid()}")
    draft.mkdir(parents=True, exist_ok=True)
    try:
        tokenizer, weights = make()
        model.save(weights, tokenizer, draft)
        draft.rename(directory)  # a directory that exists is complete
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return directory


def fit(
    weights: Any, batches: Batches, schedule: Schedule, progress: Progress | None = None
) -> None:
    """The schedule's steps, on one batch each."""
    optimizer = torch.optim.AdamW(
        weights.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate_at(step)
        input_ids, labels = next(batches)
        logits = weights(input_ids=input_ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        # Not the batch's own mean: its texts are of one length, and each text has to count alike.
        loss = loss / (schedule.batch_size * LABELS_A_TEXT)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights.parameters(), 1.0)
        optimizer.step()
        if progress:
            progress(step + 1, schedule.steps, loss.item())


def batches_of(
    texts: Callable[[int], list[str]],
    tokenizer: Any,
    schedule: Schedule,
    choose: Callable[[range, int], list[int]],
) -> Batches:
    """Endless; only the assistant's words are labels.

    Args:
        texts: gives so many rendered conversations.
        choose: of a range, so many in random order.
    """
    while True:
        some = sorted(texts(schedule.batch_size * 8), key=len)  # equal lengths: less padding
        starts = range(0, len(some), schedule.batch_size)
        for start in choose(starts, len(starts)):
            batch = some[start : start + schedule.batch_size]
            input_ids = tokenizer(batch, padding=True, return_tensors="pt")["input_ids"]
            yield input_ids, labels_of(input_ids, tokenizer)


def labels_of(input_ids: torch.Tensor, tokenizer: Any) -> torch.Tensor:
    begin, end = tokenizer.convert_tokens_to_ids([model.ASSISTANT, model.END])
    labels = torch.full_like(input_ids, IGNORED)
    for row, ids in enumerate(input_ids.tolist()):
        speaking = False
        for column, token in enumerate(ids):
            if speaking:
                labels[row, column] = token
            speaking = (speaking or token == begin) and token != end
    return labels
