"""An example of a framework, run in that framework's Python against a proxy, and what it left."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from support.cli_agents.loopback import loopback
from support.frameworks.pythons import ROOT, framework_python
from support.proxy.proxy_with_engine import ProxyWithEngine

EXAMPLES = ROOT / "examples" / "frameworks"
TIMEOUT_S = 200.0
# Frameworks keep settings and memories in HOME, and look for keys and for where to report to.
_TAKEN_FROM_HERE = ("PATH", "LANG", "LC_ALL", "TMPDIR")
# Runs a file as Python would, with tracegrad's log from INFO on.
_WITH_LOG = """
import logging, runpy, sys
logging.basicConfig(format="%(message)s")
logging.getLogger("tracegrad").setLevel(logging.INFO)
runpy.run_path(sys.argv[1], run_name="__main__")
"""
_QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


@dataclass(frozen=True, slots=True)
class ExampleRun:
    """`output`: with what it wrote to stderr, of tracegrad's log from INFO on."""

    output: str

    @property
    def instrumented(self) -> list[str]:
        """What it says of TRACEGRAD_INSTRUMENT=1."""
        return re.findall(r"TRACEGRAD_INSTRUMENT: (\S+) is instrumented$", self.output, re.M)


def run_example(
    name: str, proxy: ProxyWithEngine, home: str, *, file: Path | None = None
) -> ExampleRun:
    """Runs `examples/frameworks/NAME.py`, or `file`, in the framework's Python, from where it
    reaches the proxy and nothing else; AssertionError with its output where it fails."""
    python = framework_python(name)
    environ = {each: os.environ[each] for each in _TAKEN_FROM_HERE if each in os.environ}
    log = Path(home) / "example.log"
    with loopback() as inside, inside.relay(proxy.url) as seen:
        environ |= {
            "HOME": home,
            "PYTHONPATH": str(ROOT / "sdk"),
            "PYTHONUNBUFFERED": "1",  # stderr goes to the same file
            "TRACEGRAD_URL": seen,
            "TRACEGRAD_INSTRUMENT": "1",
            "TRACEGRAD_JOURNAL": os.environ["TRACEGRAD_JOURNAL"],
            **_QUIET,
        }
        command = [str(python), "-c", _WITH_LOG, str(file or EXAMPLES / f"{name}.py")]
        code = inside.run(command, cwd=Path(home), env=environ, log=log, timeout_s=TIMEOUT_S)
    output = log.read_text(errors="replace")
    assert code == 0, output[-8_000:]
    return ExampleRun(output)
