"""TRACEGRAD_INSTRUMENT: what a process turns on without a line of the program, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.sdk.fake_distributions import put_distribution

LOG = """
import logging, sys
logging.basicConfig(format="%(levelname)s %(message)s")
logging.getLogger("tracegrad").setLevel(logging.INFO)
"""
SMOLAGENTS = "fake_openinference_instrumentation_smolagents"
ON = "INFO TRACEGRAD_INSTRUMENT: smolagents is instrumented"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """smolagents and DSPy, each with an instrumentor that changes what its `run` is."""
    for name in ("smolagents", "dspy"):
        put_distribution(tmp_path, name)
        (tmp_path / f"{name}.py").write_text("def run(): return 'plain'\n")
        body = f"import {name}; {name}.run = lambda: 'with spans'"
        put_distribution(tmp_path, f"openinference-instrumentation-{name}", name, body)
    return tmp_path


def run(folder: Path, program: str, value: str | None = None, **environ: str) -> tuple[str, str]:
    """What the program prints, and the log. AssertionError where it fails."""
    environ = {**os.environ, "PYTHONPATH": str(folder), **environ}
    environ.pop("TRACEGRAD_INSTRUMENT", None)
    if value is not None:
        environ["TRACEGRAD_INSTRUMENT"] = value
    done = subprocess.run(
        [sys.executable, "-c", LOG + program],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.strip()


@pytest.mark.parametrize("value", ["1", "smolagents", " smolagents , "])
@pytest.mark.parametrize(
    "program",
    [
        "import tracegrad; import smolagents; print(smolagents.run())",
        "import tracegrad; from smolagents import run; print(run())",
        "import smolagents; import tracegrad; print(smolagents.run())",
    ],
)
def test_a_framework_is_instrumented_where_it_is_imported_before_or_after(
    installed: Path, program: str, value: str
) -> None:
    assert run(installed, program, value) == ("with spans", ON)


def test_a_function_that_was_taken_before_is_the_plain_one(installed: Path) -> None:
    """As docs/frameworks.md says of `query` of the Claude Agent SDK."""
    program = "from smolagents import run; import tracegrad; print(run())"
    assert run(installed, program, "1") == ("plain", ON)


def test_nothing_is_imported_for_its_sake(installed: Path) -> None:
    program = "import tracegrad; print([n for n in ('dspy', 'smolagents') if n in sys.modules])"
    assert run(installed, program, "1") == ("[]", "")
    program = (
        f"import tracegrad, smolagents; print('dspy' in sys.modules, {SMOLAGENTS!r} in sys.modules)"
    )
    assert run(installed, program, "1") == ("False True", ON)


def test_what_is_not_named_is_left_alone(installed: Path) -> None:
    program = "import tracegrad, smolagents, dspy; print(smolagents.run(), dspy.run())"
    assert run(installed, program, "smolagents") == ("with spans plain", ON)


@pytest.mark.parametrize("value", [None, "", "0", " "])
def test_it_is_off(installed: Path, value: str | None) -> None:
    program = "import tracegrad, smolagents; print(smolagents.run())"
    assert run(installed, program, value) == ("plain", "")


def test_without_it_nothing_more_is_imported(installed: Path) -> None:
    program = "import tracegrad; print('tracegrad.instrument_variable' in sys.modules)"
    assert run(installed, program) == ("False", "")


def test_a_client_beside_a_framework_is_left_alone(installed: Path) -> None:
    put_distribution(installed, "openai")
    (installed / "openai.py").write_text("")
    put_distribution(installed, "openinference-instrumentation-openai", "openai")
    program = "import tracegrad, openai"
    assert run(installed, program, "1") == ("", "")
    on = "INFO TRACEGRAD_INSTRUMENT: openai is instrumented"
    assert run(installed, program, "openai") == ("", on)


def test_what_only_carries_spans_is_said_where_it_is_named(installed: Path) -> None:
    put_distribution(installed, "mcp", version="2.3")
    (installed / "mcp.py").write_text("")
    assert run(installed, "import tracegrad, mcp", "1") == ("", "")
    program = """
import tracegrad, mcp
from opentelemetry import trace
print(type(trace.get_tracer_provider()).__module__)
"""
    on = "INFO TRACEGRAD_INSTRUMENT: mcp is instrumented"
    assert run(installed, program, "mcp") == ("opentelemetry.sdk.trace", on)


def test_a_wrong_name_is_one_warning(installed: Path) -> None:
    program = "import tracegrad, smolagents; print(smolagents.run())"
    out, log = run(installed, program, "smolagnets,smolagents")
    said, on = log.splitlines()
    assert (out, on) == ("with spans", ON)
    assert said.startswith(
        "WARNING TRACEGRAD_INSTRUMENT: 'smolagnets' is no framework that is known here; write 1"
        " for all that are installed, or names of ag2, "
    )
    _, said = run(installed, program, "true")
    assert said.startswith("WARNING TRACEGRAD_INSTRUMENT: 'true' is no framework")


def test_a_named_framework_that_is_not_installed_is_a_warning(installed: Path) -> None:
    assert run(installed, "import tracegrad", "strands") == (
        "",
        "WARNING TRACEGRAD_INSTRUMENT: Strands Agents is not installed here:"
        " pip install strands-agents",
    )


def test_a_broken_instrumentor_fails_no_import(installed: Path) -> None:
    module = installed / f"{SMOLAGENTS}.py"
    module.write_text("raise RuntimeError('no such attribute')")
    out, log = run(installed, "import tracegrad, smolagents; print(smolagents.run())", "1")
    assert out == "plain"
    assert "does not work with smolagents 1.5: RuntimeError: no such attribute" in log


def test_a_wrong_address_fails_no_import(installed: Path) -> None:
    program = "import tracegrad, smolagents; print(smolagents.run())"
    out, log = run(installed, program, "1", TRACEGRAD_URL="nowhere")
    assert out == "plain"
    assert log.startswith(
        "WARNING TRACEGRAD_INSTRUMENT: smolagents is not instrumented: TRACEGRAD_URL: 'nowhere'"
    )
