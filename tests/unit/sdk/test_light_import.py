"""An agent's process pays next to nothing for `import tracegrad`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from support.sdk.fake_proxy import FakeProxy

HEAVY = {"torch", "numpy", "sqlalchemy", "pydantic", "fastapi", "starlette", "aiohttp", "httpx"}
LATER = {"opentelemetry", "tracegrad.telemetry", "tracegrad.store", "tracegrad.proxy"}
SECONDS = 0.3

PROBE = """
import json, sys, time, threading
began = time.process_time()
import tracegrad
took = time.process_time() - began
print(json.dumps([took, sorted(sys.modules), threading.active_count()]))
"""


def test_importing_is_light_and_starts_nothing() -> None:
    runs = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", PROBE], capture_output=True, check=True, timeout=60
            ).stdout
        )
        for _ in range(3)
    ]
    _, modules, threads = runs[0]
    assert not (HEAVY | LATER) & set(modules)
    assert threads == 1
    # Processor time, and the best of three: neighbours on the machine do not count.
    assert min(took for took, _, _ in runs) < SECONDS


IMPORTS_OF_THREADS = """
import sys, threading

found = []

class Spy:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            found.append(name)

sys.meta_path.insert(0, Spy())
import tracegrad

with tracegrad.rollout() as r:
    assert r.base_url
    tracegrad.reward(1)
assert tracegrad.flush(60)
print(found)
"""


def test_threads_of_ours_import_nothing(proxy: FakeProxy) -> None:
    """A fork during such an import would leave its lock held in the child, for ever."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_OF_THREADS],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
