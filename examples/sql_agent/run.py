"""The SQL agent's play: agent, tasks, model."""

from __future__ import annotations

from pathlib import Path

from examples.shop.play import Plan, Play
from examples.shop.rollouts import Attempt, attempts_of
from examples.shop.run import SERVE
from examples.shop.screen import Screen

from . import database, tasks
from .agent import SqlAgent
from .warm_start import Recipe, warm_start


def warm_up(plan: Plan, screen: Screen) -> Path:
    recipe = Recipe(seed=plan.model_seed)
    return screen.warm_start(recipe.steps, lambda seen: warm_start(plan.root, recipe, seen))


def attempts(plan: Plan) -> Attempt:
    agent = SqlAgent(database.create(plan.state_dir / "shop.db"))
    return attempts_of("sql", agent.answer)


PLAY = Play(
    title="A LangGraph agent that writes SQL, trained while it works",
    settings={**SERVE, "optim.lr": 7e-4},
    steps=16,
    groups=16,
    samples=8,
    warm_up=warm_up,
    attempts=attempts,
    exam=tasks.exam,
    train_tasks=tasks.train_tasks,
)
