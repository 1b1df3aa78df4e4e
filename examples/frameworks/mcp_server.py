"""An MCP server with one tool, which mcp_tools.py starts.

From MCP 2 on it makes a span of each call, child of the caller's. The numbered lines send them to
the address in OTEL_EXPORTER_OTLP_ENDPOINT.
"""

from mcp.server import MCPServer
from opentelemetry import trace  # 1
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # 2
from opentelemetry.sdk.trace import TracerProvider  # 3
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # 4

provider = TracerProvider()  # 5
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))  # 6
trace.set_tracer_provider(provider)  # 7

server = MCPServer("forecasts")


@server.tool()
def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


if __name__ == "__main__":
    server.run("stdio")
