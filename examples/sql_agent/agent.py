"""A LangGraph agent: writes a query, checks it, executes it, and rewrites what was wrong.

             ┌────────── rewrite ◄──────────┐
             ▼            ▲                 │
  write ─► check ─ wrong ─┘                 │
             └──── right ──► execute ─ error┘
                                └──── rows ──► end

After MAX_REWRITES a query is executed whatever the check says. It knows nothing of training.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from pydantic import SecretStr

from .database import SCHEMA, Database, QueryFailed, Rows

MODEL = "gpt-4.1-mini"
MAX_REWRITES = 2
CHECK, REWRITE, YES, NO = "Is it right?", "Rewrite it.", "yes", "no"

Next = Literal["rewrite", "execute", "__end__"]


def chat_model(**settings: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=os.environ.get("TRACEGRAD_URL", "http://127.0.0.1:4141") + "/v1",
        api_key=SecretStr("not-needed"),
        max_completion_tokens=48,
        max_retries=0,
        **settings,
    )


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    temperature: float
    query: str
    problem: str | None  # with the query, as SQLite or the check says
    rewrites: int
    rows: Rows | None


class SqlAgent:
    """Answers questions over one database.

    `reviewer` checks what `author` writes; by default they are one."""

    def __init__(
        self,
        database: Path,
        *,
        author: ChatOpenAI | None = None,
        reviewer: ChatOpenAI | None = None,
    ) -> None:
        self._database = Database(database)
        self._author = author or chat_model()
        self._reviewer = reviewer or self._author
        graph = StateGraph(State)
        graph.add_node("write", self._write)
        graph.add_node("check", self._check)
        graph.add_node("execute", self._execute)
        graph.add_node("rewrite", self._rewrite)
        graph.add_edge(START, "write")
        graph.add_edge("write", "check")
        graph.add_edge("rewrite", "check")
        graph.add_conditional_edges("check", _after_check)
        graph.add_conditional_edges("execute", _after_execute)
        self._graph = graph.compile()

    async def answer(self, question: str, temperature: float = 1.0) -> Rows | None:
        """What its last query gave; None if that failed."""
        state = await self._graph.ainvoke(
            State(
                messages=[SystemMessage(SCHEMA), HumanMessage(question)],
                temperature=temperature,
                query="",
                problem=None,
                rewrites=0,
                rows=None,
            )
        )
        rows: Rows | None = state["rows"]
        return rows

    async def _write(self, state: State) -> dict[str, Any]:
        reply = await self._author.ainvoke(state["messages"], temperature=state["temperature"])
        return {"messages": [reply], "query": reply.text}

    async def _check(self, state: State) -> dict[str, Any]:
        asked = HumanMessage(CHECK)
        reply = await _asked(self._reviewer, asked, state)
        problem = None if reply.text.strip() == YES else REWRITE
        return {"messages": [asked, reply], "problem": problem}

    async def _execute(self, state: State) -> dict[str, Any]:
        try:
            return {"rows": self._database.query(state["query"]), "problem": None}
        except QueryFailed as error:
            return {"problem": f"{error.message}. {REWRITE}"}

    async def _rewrite(self, state: State) -> dict[str, Any]:
        asked = HumanMessage(state["problem"] or REWRITE)
        reply = await _asked(self._author, asked, state)
        rewrites = state["rewrites"] + 1
        return {"messages": [asked, reply], "query": reply.text, "rewrites": rewrites}


async def _asked(model: ChatOpenAI, asked: HumanMessage, state: State) -> AIMessage:
    return await model.ainvoke([*state["messages"], asked], temperature=state["temperature"])


def _after_check(state: State) -> Next:
    wrong = state["problem"] is not None
    return "rewrite" if wrong and state["rewrites"] < MAX_REWRITES else "execute"


def _after_execute(state: State) -> Next:
    if state["problem"] is None:
        return END
    return "rewrite" if state["rewrites"] < MAX_REWRITES else END
