"""The namespace that CLI agents are shut in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from support.cli_agents.loopback import Loopback, NoNamespace, loopback
from support.proxy.servers import eventually, serving

pytestmark = pytest.mark.agents

ENV = {"PATH": "/usr/bin:/bin", "ONLY": "this"}
TESTS = Path(__file__).resolve().parents[1]


def inside(place: Loopback, cwd: Path, *command: str) -> str:
    log = cwd / "said"
    code = place.run(command, cwd=cwd, env=ENV, log=log, timeout_s=20)
    assert code == 0, log.read_text()
    return log.read_text()


def python(place: Loopback, cwd: Path, code: str) -> str:
    return inside(place, cwd, sys.executable, "-I", "-c", code)


def test_there_is_nothing_but_loopback(tmp_path: Path) -> None:
    with loopback() as place:
        code = "import socket; print([name for _, name in socket.if_nameindex()])"
        assert python(place, tmp_path, code) == "['lo']\n"
        code = """
import errno, socket
for attempt in (
    lambda: socket.getaddrinfo("pypi.org", 443),
    lambda: socket.create_connection(("192.0.2.1", 443), timeout=5),
):
    try:
        attempt()
    except socket.gaierror:
        print("no name")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
        assert python(place, tmp_path, code) == "no name\nENETUNREACH\n"


def test_programs_get_their_folder_their_environment_and_no_more(tmp_path: Path) -> None:
    with loopback() as place:
        code = "import os; print(os.getcwd(), sorted(os.environ))"
        said = python(place, tmp_path, code)
        numbers = inside(place, tmp_path, "/bin/sh", "-c", "cd /proc && echo [0-9]*")
    names = said.split("[")[1].split("]")[0]
    assert said.startswith(f"{tmp_path} ")
    assert {"'ONLY'", "'PATH'"} <= set(names.split(", "))
    assert "HOME" not in names
    assert len(numbers.split()) == 2  # the namespace's first process, and the shell itself


def test_a_server_outside_is_reached_through_the_relay(tmp_path: Path) -> None:
    async def echo(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"{len(await request.body())} bytes for {request.url.path}")

    app = Starlette(routes=[Route("/{path:path}", echo, methods=["POST"])])
    with serving(app, "off") as url, loopback() as place, place.relay(url) as seen:
        assert seen != url
        code = f"""
import urllib.request
for path in ("/a", "/b"):
    print(urllib.request.urlopen("{seen}" + path, b"x" * 300_000).read().decode())
"""
        assert python(place, tmp_path, code) == "300000 bytes for /a\n300000 bytes for /b\n"
        with pytest.raises(httpx.ConnectError):
            httpx.get(seen)  # out here nothing listens


def test_it_ends_with_all_that_runs_in_it(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "{tmp_path}"],
                 start_new_session=True, stdout=subprocess.DEVNULL)
"""

    def daemons() -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if str(tmp_path) in _command(p)]

    with loopback() as place:
        python(place, tmp_path, code)
        [daemon] = daemons()
        assert daemon.status() != psutil.STATUS_ZOMBIE
    eventually(lambda: not daemons())


def test_it_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from support.cli_agents.loopback import loopback
with loopback() as place:
    print("up", flush=True)
    folder = Path({str(tmp_path)!r})
    place.run(["sleep", "600"], cwd=folder, env={ENV!r}, log=folder / "log", timeout_s=600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        family = eventually(lambda: _family(owner.pid))
        owner.kill()
    _, left = psutil.wait_procs(family, timeout=60)
    assert left == []


def test_what_takes_too_long_ends_with_it(tmp_path: Path) -> None:
    log = tmp_path / "said"
    with loopback() as place:
        with pytest.raises(TimeoutError):
            place.run(
                ["sh", "-c", "echo busy; exec sleep 600"],
                cwd=tmp_path,
                env={**ENV, "MARK": str(tmp_path)},
                log=log,
                timeout_s=2.0,
            )
        [busy] = [p for p in psutil.process_iter() if _environment(p).get("MARK") == str(tmp_path)]
    assert log.read_text() == "busy\n"
    _, left = psutil.wait_procs([busy], timeout=60)
    assert left == []


def test_how_a_program_ended_is_told(tmp_path: Path) -> None:
    with loopback() as place:
        codes = [
            place.run(["sh", "-c", code], cwd=tmp_path, env=ENV, log=tmp_path / "x", timeout_s=20)
            for code in ("exit 7", "sleep 600 & kill -9 $$")
        ]
    assert codes == [7, -9]


def test_a_machine_that_allows_no_namespace_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refusing = tmp_path / "unshare"
    refusing.write_text(
        "#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n"
    )
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(NoNamespace, match=r"\(unshare: unshare failed: .*CAP_SYS_ADMIN"),
        loopback(),
    ):
        pass


def _family(pid: int) -> list[psutil.Process]:
    """`unshare`, process 1 and the program in it; [] until all are there."""
    family = psutil.Process(pid).children(recursive=True)
    return family if len(family) == 3 and "sleep" in _command(family[2]) else []


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
