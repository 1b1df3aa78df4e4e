"""Supervised warm start: the model learns to use the tools from a careless colleague.

The demonstrations show the right format, and most of them make the mistake that is typical of
their kind of question: they ask for the forecast instead of the stock, for the catalogue's price
instead of today's, or forget to multiply. What a tool returned is made up anew each time, so that
the model learns to copy results instead of learning them by heart.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers.utils.chat_template_utils import render_jinja_template

from . import agent, model, tasks

Progress = Callable[[int, int, float], None]  # steps done, steps in all, loss
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]  # input ids, labels: both [batch, longest]
IGNORED = -100
LABELS_A_TEXT = 25  # on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that decides the weights, besides the code. Equal recipes give equal directories."""

    seed: int = 0
    hidden: int = 128
    layers: int = 4
    vocab_size: int = 700
    steps: int = 440
    batch_size: int = 16
    learning_rate: float = 1.5e-3
    warm_up: int = 30
    decay_share: float = 0.5  # the last part of the steps, with linear decay to zero
    mistakes: float = 0.65  # share of demonstrations that make their kind's mistake
    totals: float = 0.5  # share of demonstrations that ask for a total

    def learning_rate_at(self, step: int) -> float:
        rising = (step + 1) / self.warm_up
        falling = (self.steps - step) / (self.steps * self.decay_share)
        return self.learning_rate * min(1.0, rising, falling)

    def digest(self) -> str:
        """Identifies the recipe together with the code and the libraries that carry it out."""
        import transformers

        folder = Path(__file__).parent
        parts = [
            json.dumps(asdict(self), sort_keys=True),
            json.dumps(agent.TOOLS),
            *((folder / f"{name}.py").read_text() for name in ("tasks", "model", "warm_start")),
            torch.__version__,
            transformers.__version__,
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def warm_start(
    root: Path = Path(".tracegrad/demo"),
    recipe: Recipe | None = None,
    progress: Progress | None = None,
) -> Path:
    """The directory of the warm-started model, made now unless `root` has it already."""
    recipe = recipe or Recipe()
    directory = root / f"model-{recipe.digest()}"
    if directory.exists():
        return directory
    draft = root / f"{directory.name}.draft-{os.getpid()}"
    draft.mkdir(parents=True, exist_ok=True)
    try:
        tokenizer, weights = train(recipe, progress)
        model.save(weights, tokenizer, draft)
        draft.rename(directory)  # a directory that exists is complete
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return directory


def train(recipe: Recipe, progress: Progress | None = None) -> tuple[Any, Any]:
    """Trains a tokenizer and a model from nothing; returns both."""
    torch.manual_seed(recipe.seed)
    tokenizer = model.train_tokenizer(corpus(), recipe.vocab_size)
    weights = model.new_model(tokenizer, hidden=recipe.hidden, layers=recipe.layers)
    fit(weights, _batches(tokenizer, recipe), recipe, progress)
    return tokenizer, weights


def fit(weights: Any, batches: Batches, recipe: Recipe, progress: Progress | None = None) -> None:
    """The recipe's steps, on one batch each."""
    optimizer = torch.optim.AdamW(
        weights.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        input_ids, labels = next(batches)
        logits = weights(input_ids=input_ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        # Not the batch's own mean: its texts are of one length, and each text has to count alike.
        loss = loss / (recipe.batch_size * LABELS_A_TEXT)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights.parameters(), 1.0)
        optimizer.step()
        if progress:
            progress(step + 1, recipe.steps, loss.item())


def demonstration(rng: random.Random, mistakes: float, totals: float) -> list[dict[str, Any]]:
    """One conversation about a pair of the train split, in OpenAI's format."""
    kind: tasks.Kind = "total" if rng.random() < totals else rng.choice(("stock", "price"))
    item, city = rng.choice(tasks.pairs("train"))
    quantity = rng.choice(tasks.QUANTITIES) if kind == "total" else 1
    task = tasks.Task(kind, item, city, quantity, rng.randrange(2), "train")
    careless = rng.random() < mistakes
    lookup = {
        "stock": "forecast" if careless else "stock",
        "price": "list_price" if careless else "price",
        "total": "price",
    }[kind]
    figure = rng.randrange(11, 100)
    messages = [{"role": "user", "content": task.question}]
    messages += _use(lookup, {"item": item, "city": city}, figure)
    if kind == "total" and not careless:
        messages += _use("multiply", {"a": quantity, "b": figure}, quantity * figure)
    return [*messages, {"role": "assistant", "content": messages[-1]["content"]}]


def _use(name: str, arguments: dict[str, Any], result: int) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": str(result)},
    ]


def corpus() -> Iterator[str]:
    rng = random.Random("tokenizer")
    yield from _texts([demonstration(rng, 0.5, 0.5) for _ in range(2000)])


def _texts(conversations: list[list[dict[str, Any]]]) -> list[str]:
    texts, _ = render_jinja_template(
        conversations=conversations, tools=agent.TOOLS, chat_template=model.CHAT_TEMPLATE
    )
    return list(texts)


def _batches(tokenizer: Any, recipe: Recipe) -> Batches:
    """Endless; only the assistant's words are labels."""
    rng = random.Random(f"demonstrations {recipe.seed}")
    while True:
        texts = _texts(
            [
                demonstration(rng, recipe.mistakes, recipe.totals)
                for _ in range(recipe.batch_size * 8)
            ]
        )
        texts.sort(key=len)  # equal lengths together: less padding to compute
        starts = range(0, len(texts), recipe.batch_size)
        for start in rng.sample(starts, len(starts)):
            batch = texts[start : start + recipe.batch_size]
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


def main() -> None:
    """`python -m examples.shop.warm_start [SEED]`: makes the model and says where it is."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    start = time.monotonic()

    def progress(done: int, steps: int, loss: float) -> None:
        print(f"\rwarm start {done}/{steps}  loss {loss:.3f}", end="", file=sys.stderr)

    directory = warm_start(recipe=Recipe(seed=seed), progress=progress)
    print(f"\n{time.monotonic() - start:.0f} s", file=sys.stderr)
    print(directory)


if __name__ == "__main__":
    main()
