"""An example of a framework, run in that framework's Python against a proxy, and what it left."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support.frameworks.pythons import ROOT, framework_python
from support.proxy.proxy_with_engine import ProxyWithEngine

EXAMPLES = ROOT / "examples" / "frameworks"
TIMEOUT_S = 200.0
# Frameworks keep settings and memories in HOME, and look for keys and for where to report to.
_TAKEN_FROM_HERE = ("PATH", "LANG", "LC_ALL", "TMPDIR")
_QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


@dataclass(frozen=True, slots=True)
class ExampleRun:
    """`spans_of`: what `instrument()` returned in it."""

    output: str
    errors: str

    @property
    def spans_of(self) -> list[str]:
        [line] = [line for line in self.output.splitlines() if line.startswith("spans of:")]
        return line.removeprefix("spans of:").split()


def run_example(
    name: str, proxy: ProxyWithEngine, home: str, *, file: Path | None = None
) -> ExampleRun:
    """Runs `examples/frameworks/NAME.py`, or `file`, in the framework's Python; AssertionError with
    its output where it fails."""
    environ = {each: os.environ[each] for each in _TAKEN_FROM_HERE if each in os.environ}
    environ |= {
        "HOME": home,
        "PYTHONPATH": str(ROOT / "sdk"),
        "TRACEGRAD_URL": proxy.url,
        "TRACEGRAD_JOURNAL": os.environ["TRACEGRAD_JOURNAL"],
        **_QUIET,
    }
    done = subprocess.run(
        [str(framework_python(name)), str(file or EXAMPLES / f"{name}.py")],
        env=environ,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2_000:]}\n{done.stderr[-6_000:]}"
    return ExampleRun(done.stdout, done.stderr)
