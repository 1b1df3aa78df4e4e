"""An agent of OpenAI's Agents SDK whose tools are those of an MCP server, in a process of its own.

export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/mcp_tools.py
"""

import asyncio
import os
import sys
from pathlib import Path

from agents.mcp import MCPServerStdio

from agents import Agent, Runner
from tracegrad import trace  # 1

SERVER = {
    "command": sys.executable,
    "args": [str(Path(__file__).with_name("mcp_server.py"))],
    # An MCP client gives a server none of its own environment; it is not to give rewards.
    "env": {**os.environ, "TRACEGRAD_INSTRUMENT": "mcp", "TRACEGRAD_API_KEY": ""},  # 3
}


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
async def solve(question: str) -> str:
    async with MCPServerStdio(SERVER, client_session_timeout_seconds=60) as tools:
        model = os.environ.get("MODEL", "policy")
        agent = Agent(name="forecaster", model=model, mcp_servers=[tools])
        return str((await Runner.run(agent, question)).final_output)


async def main() -> None:
    for _ in range(2):  # attempts at one task
        print(await solve("What is the weather in Ulm?"))


if __name__ == "__main__":
    asyncio.run(main())
