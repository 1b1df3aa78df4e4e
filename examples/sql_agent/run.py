"""The SQL agent's play: agent, tasks, model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from examples.shop.play import Plan, Play
from examples.shop.rollouts import Attempt, attempts_of
from examples.shop.run import SERVE
from examples.shop.screen import Screen

from . import database, tasks
from .agent import SqlAgent
from .warm_start import SMALL, Recipe, warm_start


def warm_up(plan: Plan, screen: Screen, recipe: Recipe | None = None) -> Path:
    recipe = replace(recipe or Recipe(), seed=plan.model_seed)
    return screen.warm_start(recipe.steps, lambda seen: warm_start(plan.root, recipe, seen))


def attempts(plan: Plan) -> Attempt:
    agent = SqlAgent(database.create(plan.state_dir / "shop.db"))
    return attempts_of("sql", agent.answer)


PLAY = Play(
    title="A LangGraph agent that writes SQL, trained while it works",
    settings={
        **SERVE,
        "optim.lr": 2e-4,
        "optim.max_grad_norm": 0.3,
    },
    steps=24,
    groups=16,
    samples=8,
    warm_up=warm_up,
    attempts=attempts,
    exam=tasks.exam,
    train_tasks=tasks.train_tasks,
)
SMALL_PLAY = replace(
    PLAY, settings={**SERVE, "optim.lr": 7e-4}, warm_up=partial(warm_up, recipe=SMALL)
)
