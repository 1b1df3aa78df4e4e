"""Sandboxes in Podman, root's and a user's own: the same socket API, which says less."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import docker
import pytest

import tracegrad
from support.system import docker_engine, podman_engine
from support.system.docker_engine import IMAGE, Engine

pytestmark = pytest.mark.docker

# What a runner does, as whoever runs it: what it prints is a line of JSON for each command.
RUNNER = """
import asyncio, json, sys, tempfile
from dataclasses import asdict
from pathlib import Path
from tracegrad.runner.docker_backend import DockerSandboxes, DockerSettings
from tracegrad.runner.sandbox import SandboxSpec

async def main(engine, image, proxy, commands):
    backend = DockerSandboxes(
        DockerSettings(proxy=proxy, engine=engine, pull=False, locks=Path(tempfile.mkdtemp())))
    output = Path(tempfile.mkdtemp()) / "output"
    try:
        sandbox = await backend.start(SandboxSpec(image=image, workdir="/work"))
        url = sandbox.reachable(proxy)
        for command in json.loads(commands):
            end = await sandbox.run(
                command, environ={"PROXY": url, "HOSTNAME": None},
                timeout_s=2 if "while :" in command else 300, output=output, marker="none")
            print(json.dumps([end.exit_code, end.timed_out, end.error, output.read_text()]))
    finally:
        await backend.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module", params=["root", "rootless"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if reason := docker_engine.why_not():
        pytest.skip(reason)
    with podman_engine.running(rootless=request.param == "rootless") as found:
        yield found


@pytest.fixture
def proxy() -> Iterator[str]:
    """It answers each GET with `hello`."""

    class Hello(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

    with ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def python_for(uid: int) -> str:
    """An interpreter of this version that the user may start: this one may lie in root's home."""
    same = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    for each in (sys.executable, same):
        with suppress(OSError):
            command = [each, "-c", "import docker, tracegrad"]
            if subprocess.run(command, user=uid, env=environ_of(Path("/"))).returncode == 0:
                return each
    pytest.skip("no other user may start this Python")


def environ_of(home: Path) -> dict[str, str]:
    packages = [str(Path(str(each.__file__)).parents[1]) for each in (tracegrad, docker)]
    own = {"HOME": str(home), "PYTHONPATH": os.pathsep.join(packages)}
    return {**os.environ, **own, "PYTHONDONTWRITEBYTECODE": "1"}


def run(engine: Engine, proxy: str, *commands: list[str] | str) -> list[Any]:
    """As the user whose engine it is; of each command its exit code, whether it was out of time,
    why it did not start, and what it printed."""
    owner = os.stat(engine.url.removeprefix("unix://")).st_uid
    words = ["-c", RUNNER, engine.url, IMAGE, proxy, json.dumps(commands)]
    said = subprocess.run(
        [python_for(owner), *words],
        capture_output=True,
        text=True,
        user=owner,
        cwd=engine.folder,
        env=environ_of(engine.folder / "home"),
    )
    assert said.returncode == 0, said.stderr
    api = engine.client()
    assert api.containers(all=True) == [], "nothing is left"
    api.close()
    return [json.loads(line) for line in said.stdout.splitlines()]


def test_commands_end_as_they_say_and_nothing_of_them_is_left(engine: Engine, proxy: str) -> None:
    left = "(trap '' TERM; sleep 611) & setsid sleep 611 & exit 0"
    # Zombies have no command line.
    line = "tr '\\0' ' ' <$each/cmdline; echo"
    processes = f"for each in /proc/[0-9]*; do {line}; done | grep ^sleep.611"
    found = run(
        engine,
        proxy,
        "pwd; exit 3",
        ["no-such-program"],
        "echo 'executable file not found'; exit 127",
        ["env"],
        left,
        processes,
        "trap '' TERM; while :; do sleep 611; done",
        processes,
    )
    assert found[0] == [3, False, None, "/work\n"]
    # A shell says it, as any program could: before the first call it is the environment's fault.
    code, _, error, said = found[1]
    assert (code, error) == (127, None)
    assert "no-such-program: not found" in said
    assert found[2][:3] == [127, False, None]
    assert "HOSTNAME=" not in found[3][3]
    assert "PATH=" in found[3][3]
    assert found[4][0] == 0
    assert found[5][3] == ""
    assert found[6][:2] == [None, True]
    assert found[7][3] == ""


def test_the_proxy_alone_is_reached(engine: Engine, proxy: str) -> None:
    asked, networks, routes = run(
        engine,
        proxy,
        'wget -qO- "$PROXY"',
        "tail -n +3 /proc/net/dev | cut -d : -f 1 | tr -d ' '",
        "tail -n +2 /proc/net/route",
    )
    assert asked[3] == "hello"
    assert networks[3] == "lo\n"
    assert routes[3] == ""
