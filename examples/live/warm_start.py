"""The model learns to answer in three styles, whoever asks: it knows nobody's preference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from examples.shop import model
from examples.shop.supervised import Batches, Progress, Schedule, fit, kept, labels_of

from .users import ASKS_BACK, REPLIES, STYLES, User

RECIPE = Schedule(hidden=96, layers=3, vocab_size=420, steps=300, learning_rate=2e-3)
# As often as each style is shown, and how often any of them asks back.
WEIGHTS, ASKING = (0.3, 0.3, 0.4), 0.25


def warm_start(root: Path, progress: Progress | None = None) -> Path:
    """The directory of the model, made now unless `root` has it already."""
    sources = [Path(__file__), Path(__file__).with_name("users.py")]
    return kept(root / f"model-{RECIPE.digest(sources)}", lambda: _train(progress))


def _train(progress: Progress | None) -> tuple[Any, Any]:
    torch.manual_seed(RECIPE.seed)
    texts = _texts(random.Random("tokenizer"))
    tokenizer = model.train_tokenizer((next(texts) for _ in range(2000)), RECIPE.vocab_size)
    weights = model.new_model(tokenizer, hidden=RECIPE.hidden, layers=RECIPE.layers)
    fit(weights, _batches(tokenizer), RECIPE, progress)
    return tokenizer, weights


def _texts(rng: random.Random) -> Iterator[str]:
    """Endless: one question and its answer each, sometimes with another question before."""
    while True:
        asked = [User.drawn(rng) for _ in range(1 + (rng.random() < 0.3))]
        text = ""
        for user in asked:
            reply = REPLIES[rng.choices(STYLES, WEIGHTS)[0]].format(number=user.number)
            reply += ASKS_BACK if rng.random() < ASKING else ""
            text += f"{model.USER}{user.question}{model.END}{model.ASSISTANT}{reply}{model.END}"
        yield text


def _batches(tokenizer: Any) -> Batches:
    texts = _texts(random.Random(f"demonstrations {RECIPE.seed}"))
    while True:
        some = [next(texts) for _ in range(RECIPE.batch_size)]
        input_ids = tokenizer(some, padding=True, return_tensors="pt")["input_ids"]
        yield input_ids, labels_of(input_ids, tokenizer)
