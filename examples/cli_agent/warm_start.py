"""Supervised warm start: the model learns mini-swe-agent's conversation from a careless colleague.

Most demonstrations tell `wc` the file's name, which it then prints behind the number; some forget
to submit at once and do their work again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from examples.shop import model
from examples.shop.supervised import Progress, Schedule, batches_of, fit, kept
from transformers.utils.chat_template_utils import render_jinja_template

from . import tasks

SYSTEM = "You use bash."  # as in mini.yaml
# What mini-swe-agent tells its model.
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Schedule):
    """All that decides the weights, besides the code."""

    careless: float = 0.65  # share of demonstrations that tell `wc` the name
    again: float = 0.1  # of those that do their work twice
    steps: int = 300
    vocab_size: int = 520


# Made in a third of the time; it learns half as fast later.
SMALL = Recipe(hidden=64, layers=3, learning_rate=4e-3)


def warm_start(root: Path, recipe: Recipe, progress: Progress | None = None) -> Path:
    """The directory of the warm-started model, made now unless `root` has it already."""
    sources = [Path(__file__), Path(__file__).with_name("tasks.py")]
    return kept(root / f"model-{recipe.digest(sources)}", lambda: train(recipe, progress))


def train(recipe: Recipe, progress: Progress | None = None) -> tuple[Any, Any]:
    """Trains a tokenizer and a model from nothing; returns both."""
    torch.manual_seed(recipe.seed)
    rng = random.Random("tokenizer")
    corpus = _texts([demonstration(rng, recipe) for _ in range(2000)])
    tokenizer = model.train_tokenizer(corpus, recipe.vocab_size)
    weights = model.new_model(tokenizer, hidden=recipe.hidden, layers=recipe.layers)
    shown = random.Random(f"demonstrations {recipe.seed}")

    def texts(count: int) -> list[str]:
        return _texts([demonstration(shown, recipe) for _ in range(count)])

    fit(weights, batches_of(texts, tokenizer, recipe, shown.sample), recipe, progress)
    return tokenizer, weights


def demonstration(rng: random.Random, recipe: Recipe) -> list[dict[str, Any]]:
    """One conversation about a training task, in OpenAI's format."""
    task = rng.choice(tasks.of("train"))
    careless = rng.random() < recipe.careless
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.prompt}]
    for _ in range(1 + (rng.random() < recipe.again)):
        messages += _run(task.careless_command if careless else task.command, "0")
    return [*messages, *_run(tasks.SUBMIT, None)]


def _run(command: str, result: str | None) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    return said if result is None else [*said, {"role": "tool", "content": result}]


def _texts(conversations: list[list[dict[str, Any]]]) -> list[str]:
    texts, _ = render_jinja_template(
        conversations=conversations, tools=[BASH], chat_template=model.CHAT_TEMPLATE
    )
    return list(texts)
