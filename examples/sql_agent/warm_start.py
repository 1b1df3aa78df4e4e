"""Supervised warm start: the model learns the agent's conversation from a careless colleague.

Most demonstrations write the query that is typical of hasty work on their kind of question, and
most of those call it right. Some misspell a column, so that SQLite's own words are read and the
query is rewritten. A model this small does not know what it has never seen: some rewrite as often
as the agent does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from examples.shop import model
from examples.shop.supervised import Progress, Schedule, batches_of, fit, kept

from . import tasks
from .agent import CHECK, MAX_REWRITES, NO, REWRITE, YES
from .database import SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Schedule):
    """All that decides the weights, besides the code."""

    careless: float = 0.65  # share of first queries with their kind's mistake
    misspelt: float = 0.1  # share of them that no table has the columns for
    notices: float = 0.15  # a check that finds a careless query wrong
    doubts: float = 0.2  # a check that finds a right one wrong: it is written once more
    steps: int = 400


# Made in a third of the time; it learns half as fast later.
SMALL = Recipe(hidden=64, layers=3, steps=500, learning_rate=4e-3)


def warm_start(root: Path, recipe: Recipe, progress: Progress | None = None) -> Path:
    """The directory of the warm-started model, made now unless `root` has it already."""
    sources = [Path(__file__).with_name(f"{n}.py") for n in ("warm_start", "tasks", "agent")]
    return kept(root / f"model-{recipe.digest(sources, SCHEMA)}", lambda: train(recipe, progress))


def train(recipe: Recipe, progress: Progress | None = None) -> tuple[Any, Any]:
    """Trains a tokenizer and a model from nothing; returns both."""
    torch.manual_seed(recipe.seed)
    rng = random.Random("tokenizer")
    corpus = (demonstration(rng, recipe) for _ in range(3000))
    tokenizer = model.train_tokenizer(corpus, recipe.vocab_size)
    weights = model.new_model(tokenizer, hidden=recipe.hidden, layers=recipe.layers)
    shown = random.Random(f"demonstrations {recipe.seed}")

    def texts(count: int) -> list[str]:
        return [demonstration(shown, recipe) for _ in range(count)]

    fit(weights, batches_of(texts, tokenizer, recipe, shown.sample), recipe, progress)
    return tokenizer, weights


def demonstration(rng: random.Random, recipe: Recipe) -> str:
    """One conversation about pairs of the train split, as the chat template prints it."""
    task = tasks.drawn(rng, "train")
    said = [(model.SYSTEM, SCHEMA), (model.USER, task.question)]
    query, error, wrong = _first(task, rng, recipe)
    for rewrites in range(MAX_REWRITES + 1):
        said += [
            (model.ASSISTANT, query),
            (model.USER, CHECK),
            (model.ASSISTANT, NO if wrong else YES),
        ]
        problem = REWRITE if wrong else error
        if problem is None or rewrites == MAX_REWRITES:
            break
        said.append((model.USER, problem))
        query, error, wrong = task.query, None, rng.random() < recipe.doubts
    return "".join(f"{who}{text}{model.END}" for who, text in said)


def _first(task: tasks.Task, rng: random.Random, recipe: Recipe) -> tuple[str, str | None, bool]:
    """A query, what is said of it where SQLite finds an error, and whether the check finds it
    wrong."""
    kind = rng.random()
    if kind < recipe.careless:
        return task.careless_query, None, rng.random() < recipe.notices
    if kind < recipe.careless + recipe.misspelt:
        column = "price" if task.kind == "worth" else "units"
        misspelt = column.removesuffix("s") + "_"
        error = f"no such column: {misspelt}. {REWRITE}"
        return task.query.replace(column, misspelt, 1), error, rng.random() < 0.5
    return task.query, None, rng.random() < recipe.doubts
