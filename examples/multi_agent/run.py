"""The SQL agent's play, with two agents of which one is trained."""

from __future__ import annotations

from dataclasses import replace

from examples.shop.play import Plan, Result
from examples.shop.rollouts import Attempt, attempts_of
from examples.sql_agent import database
from examples.sql_agent.agent import SqlAgent, chat_model
from examples.sql_agent.run import SMALL_PLAY
from langchain_openai import ChatOpenAI

AUTHOR, REVIEWER = "author", "reviewer"


def attempts(plan: Plan) -> Attempt:
    team = SqlAgent(
        database.create(plan.state_dir / "shop.db"),
        author=_named(AUTHOR),
        reviewer=_named(REVIEWER),
    )
    return attempts_of("team", team.answer)


def _named(agent: str) -> ChatOpenAI:
    return chat_model(default_headers={"x-tracegrad-agent": agent})


def what_is_wrong(result: Result) -> str | None:
    """Of who was trained."""
    author, reviewer = result.by_agent[AUTHOR], result.by_agent[REVIEWER]
    if reviewer.trained or not author.trained:
        return f"turns trained: {author.trained} of the author, {reviewer.trained} of the reviewer"
    return None


PLAY = replace(
    SMALL_PLAY,
    title="Two agents, of which the author is trained",
    settings={**SMALL_PLAY.settings, "batches.agents": f'["{AUTHOR}"]'},
    steps=16,
    attempts=attempts,
)
