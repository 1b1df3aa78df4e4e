"""Supervised warm start: the model learns to use the tools from a careless colleague.

The demonstrations show the right format, and most of them make the mistake that is typical of
their kind of question: they ask for the forecast instead of the stock, for the catalogue's price
instead of today's, or forget to multiply. What a tool returned is made up anew each time, so that
the model learns to copy results instead of learning them by heart.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.chat_template_utils import render_jinja_template

from . import agent, model, tasks
from .supervised import Progress, Schedule, batches_of, fit, kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Schedule):
    """All that decides the weights, besides the code. Equal recipes give equal directories."""

    mistakes: float = 0.65  # share of demonstrations that make their kind's mistake
    totals: float = 0.5  # share of demonstrations that ask for a total

    def directory(self, root: Path) -> Path:
        sources = [Path(__file__), Path(__file__).with_name("tasks.py")]
        return root / f"model-{self.digest(sources, json.dumps(agent.TOOLS))}"


def warm_start(
    root: Path = Path(".tracegrad/demo"),
    recipe: Recipe | None = None,
    progress: Progress | None = None,
) -> Path:
    """The directory of the warm-started model, made now unless `root` has it already."""
    recipe = recipe or Recipe()
    return kept(recipe.directory(root), lambda: train(recipe, progress))


def train(recipe: Recipe, progress: Progress | None = None) -> tuple[Any, Any]:
    """Trains a tokenizer and a model from nothing; returns both."""
    torch.manual_seed(recipe.seed)
    tokenizer = model.train_tokenizer(corpus(), recipe.vocab_size)
    weights = model.new_model(tokenizer, hidden=recipe.hidden, layers=recipe.layers)
    rng = random.Random(f"demonstrations {recipe.seed}")

    def texts(count: int) -> list[str]:
        return _texts([demonstration(rng, recipe.mistakes, recipe.totals) for _ in range(count)])

    fit(weights, batches_of(texts, tokenizer, recipe, rng.sample), recipe, progress)
    return tokenizer, weights


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
