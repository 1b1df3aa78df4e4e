"""Anthropic's Agent SDK: the Claude Code CLI that it brings along, with a tool of one's own.

`query` is imported behind tracegrad, which has another function put there.

export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/claude_agent.py
"""

import asyncio
import os

from tracegrad import trace  # 1

from claude_agent_sdk import ClaudeAgentOptions, create_sdk_mcp_server, query, tool


@tool("weather", "The weather in a city.", {"city": str})
async def weather(arguments: dict) -> dict:
    return {"content": [{"type": "text", "text": f"Rain in {arguments['city']}."}]}


OPTIONS = ClaudeAgentOptions(
    model=os.environ.get("MODEL", "policy"),
    system_prompt="You forecast.",
    tools=[],  # none of Claude Code's own
    mcp_servers={"sky": create_sdk_mcp_server("sky", tools=[weather])},
    allowed_tools=["mcp__sky__weather"],
    setting_sources=[],
)


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
async def solve(question: str) -> str:
    messages = query(prompt=question, options=OPTIONS)
    return [getattr(message, "result", None) async for message in messages][-1] or ""


async def main() -> None:
    for _ in range(2):  # attempts at one task
        print(await solve("What is the weather in Ulm?"))


if __name__ == "__main__":
    asyncio.run(main())
