"""Distributions as pip leaves them, with instrumentors of OpenTelemetry's."""

from __future__ import annotations

from pathlib import Path

# As OpenTelemetry's BaseInstrumentor, in so far as it is asked.
INSTRUMENTOR = """
class Instrumentor:
    _instance = None
    is_instrumented_by_opentelemetry = False
    calls = []

    def __new__(cls):
        if cls._instance is None:
            cls._instance = object.__new__(cls)
        return cls._instance

    def instrument(self, tracer_provider=None, raise_exception_on_conflict=False):
        {body}
        self.calls.append(tracer_provider)
        self.tracer = tracer_provider.get_tracer({name!r}, "1")
        self.is_instrumented_by_opentelemetry = True
"""


def put_distribution(
    folder: Path, name: str, entry: str | None = None, body: str = "pass", version: str = "1.5"
) -> None:
    """Puts one into `folder`. `entry`: the entry point of its instrumentor, None: it has none;
    `body`: what that does first."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry is not None:
        module = f"fake_{name.replace('-', '_')}"
        (folder / f"{module}.py").write_text(INSTRUMENTOR.format(body=body, name=name))
        entries = f"[opentelemetry_instrumentor]\n{entry} = {module}:Instrumentor\n"
        (info / "entry_points.txt").write_text(entries)
