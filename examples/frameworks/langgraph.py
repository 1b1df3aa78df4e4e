"""LangChain's create_agent, and a LangGraph of two such sub-agents: a forecaster and a writer.

export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/langgraph.py
"""

import os
import sys

sys.path.pop(0)  # this file has the name of the package that it imports

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from tracegrad import trace  # 1


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
def solve(question: str) -> str:
    model = ChatOpenAI(model=os.environ.get("MODEL", "policy"))
    graph = StateGraph(MessagesState)
    graph.add_node("forecaster", create_agent(model, [weather], name="forecaster"))
    graph.add_node("writer", create_agent(model, system_prompt="Write it well.", name="writer"))
    graph.add_edge(START, "forecaster")
    graph.add_edge("forecaster", "writer")
    graph.add_edge("writer", END)
    state = graph.compile().invoke({"messages": [("user", question)]})
    return str(state["messages"][-1].text)


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
