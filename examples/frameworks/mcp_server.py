"""An MCP server with one tool, which mcp_tools.py starts.

From MCP 2 on it makes a span of each call, child of the caller's. With TRACEGRAD_INSTRUMENT=mcp the
numbered line sends them to the proxy.
"""

from mcp.server import MCPServer

import tracegrad  # 1

server = MCPServer("forecasts")


@server.tool()
def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


if __name__ == "__main__":
    server.run("stdio")
