"""The program that `helm test` runs in a pod, before a real proxy behind deploy/haproxy.cfg."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from support.deploy.chart import KEY, LEAST, container, render
from support.deploy.haproxy import haproxy
from support.proxy.proxy_process import ProxyProcess


def test_the_charts_own_test_passes_and_can_fail(tmp_path: Path) -> None:
    program = [sys.executable, *container(render(LEAST), "test")["command"][1:]]
    engine, store = "http://127.0.0.1:9", f"sqlite:///{tmp_path / 'store.db'}"
    log = tmp_path / "proxy.log"
    proxy = ProxyProcess(engine, store, log, admin_key=KEY, host="0.0.0.0")
    with ExitStack() as stack:
        stack.callback(proxy.close)
        proxy.start()
        address = stack.enter_context(haproxy([proxy.url], tmp_path / "haproxy.log"))

        def code(key: str) -> int:
            environment = {**os.environ, "TRACEGRAD_URL": address, "TRACEGRAD_API_KEY": key}
            return subprocess.run(program, env=environment, capture_output=True).returncode

        assert code(KEY) == 0
        assert code(f"{KEY}x") == 1
