"""A Podman service of the tests' own, Debian's: root's, or another user's (rootless).

All that it keeps is in a folder for temporary files.
"""

from __future__ import annotations

import os
import pwd
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from docker.errors import DockerException
from requests.exceptions import RequestException

from . import debian_packages, root_filesystem
from .docker_engine import IMAGE, Engine

USER = "tracegrad-podman"
_START_S = 120.0
# Its defaults ask for more files than a machine may allow, and for systemd.
_MOST_FILES, _MOST_PROCESSES = 20_000, 10_000
_SETTINGS = """
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""


@contextmanager
def running(*, rootless: bool) -> Iterator[Engine]:
    """With the image `IMAGE`. Raises RuntimeError: it does not start; with the end of its log."""
    if shutil.which("podman") is None or shutil.which("runc") is None:
        for package in ("podman", "runc", "uidmap"):
            debian_packages.install(package)
    folder = Path(tempfile.mkdtemp(prefix="tg-podman-"))
    uid, gid = _user() if rootless else (0, 0)
    try:
        os.chown(folder, uid, gid)
        folder.chmod(0o755)
        process = _start(folder, uid, gid)
        engine = Engine(f"unix://{folder}/socket", folder)
        try:
            _wait(engine, process)
            _add_image(engine)
            yield engine
        finally:
            process.terminate()
            process.wait()
            _end_left(folder)
    finally:
        _remove(folder)


def _user() -> tuple[int, int]:
    """With a range of numbers for the users in its containers."""
    try:
        found = pwd.getpwnam(USER)
    except KeyError:
        subprocess.run(["useradd", "--no-create-home", USER], check=True)
        found = pwd.getpwnam(USER)
    return found.pw_uid, found.pw_gid


def _start(folder: Path, uid: int, gid: int) -> subprocess.Popen[bytes]:
    settings = folder / "containers.conf"
    files = _allowed(resource.RLIMIT_NOFILE, _MOST_FILES)
    processes = _allowed(resource.RLIMIT_NPROC, _MOST_PROCESSES)
    settings.write_text(_SETTINGS.format(files=files, processes=processes))
    settings.chmod(0o644)
    for name in ("home", "xdg"):
        (folder / name).mkdir(mode=0o700)
        os.chown(folder / name, uid, gid)
    environ = {
        **os.environ,
        "HOME": f"{folder}/home",
        "XDG_RUNTIME_DIR": f"{folder}/xdg",
        "CONTAINERS_CONF": str(settings),
    }
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            ["podman", "--root", f"{folder}/root", "--runroot", f"{folder}/run",
             "system", "service", "--time=0", f"unix://{folder}/socket"],
            env=environ, cwd=folder, user=uid, group=gid, extra_groups=[],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _allowed(kind: int, most: int) -> int:
    hard = resource.getrlimit(kind)[1]
    return most if hard == resource.RLIM_INFINITY else min(hard, most)


def _wait(engine: Engine, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            engine.client().close()
            return
        except (DockerException, RequestException, OSError):
            if process.poll() is not None or time.monotonic() > deadline:
                said = (engine.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(said) from None
        time.sleep(0.05)


def _add_image(engine: Engine) -> None:
    """Podman 4 has no ear for an import's tag."""
    api = engine.client()
    repository, tag = IMAGE.split(":")
    api.import_image(str(root_filesystem.archive()), repository=repository)
    api.tag(f"{repository}:latest", repository, tag)
    api.close()


def _end_left(folder: Path) -> None:
    """What the service started: its containers' watchers, which stay for minutes, and, of a
    rootless one, itself once more and a process that holds its user namespace."""
    pids = [int(written.read_text()) for written in folder.rglob("pause.pid")]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{folder}/".encode() in (process / "cmdline").read_bytes():
                pids.append(int(process.name))
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _remove(folder: Path) -> None:
    """Also what belongs to users of containers, and what is mounted."""
    for line in Path("/proc/mounts").read_text().splitlines():
        if (mounted := line.split()[1]).startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", mounted], check=False)
    shutil.rmtree(folder, ignore_errors=True)
