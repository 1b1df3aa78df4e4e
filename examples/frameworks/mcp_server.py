"""An MCP server with one tool, which mcp_tools.py starts."""

from mcp.server import MCPServer

server = MCPServer("forecasts")


@server.tool()
def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


if __name__ == "__main__":
    server.run("stdio")
