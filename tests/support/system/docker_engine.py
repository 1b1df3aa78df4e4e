"""A Docker engine of the tests' own, Debian's: started on first use, ended with the test run.

It has its data, its socket and its containers in a folder for temporary files, no bridge and no
packet filter: nothing of the machine's own network is touched. Images come from no registry: they
are imported (`root_filesystem.py`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import DockerException, ImageNotFound
from requests.exceptions import RequestException

from . import debian_packages, root_filesystem

IMAGE = "tracegrad-tests/busybox:1"
PYTHON_IMAGE = "tracegrad-tests/python:1"
_START_S = 240.0

# containerd is started beside it: dockerd gives its own 15 seconds, and a busy machine needs more.
_CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "{folder}/run"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]
[grpc]
  address = "{folder}/containerd.socket"
[ttrpc]
  address = "{folder}/containerd.socket.ttrpc"
"""

# Waits until whoever started them is gone, however that went; then ends the engine (its containers
# end with it) and containerd, and takes the folder away.
_GUARDIAN = """
trap "" INT TERM HUP
cat > /dev/null
left() { # NAME: the processes of that name in the folder; a zombie has no command line
    for process in /proc/[0-9]*; do
        grep -qs -e "$folder" $process/cmdline && grep -qsx -e "$1" $process/comm &&
            echo ${process#/proc/}
    done
}
folder=$1
for signal in TERM KILL; do for name in dockerd containerd containerd-shim; do
    for _ in $(seq 100); do
        pids=$(left $name)
        [ -n "$pids" ] || break
        kill -s $signal $pids 2> /dev/null
        sleep 0.1
    done
done; done
sed -n "s|^[^ ]* \\($folder/[^ ]*\\) .*|\\1|p" /proc/mounts | sort -r | while read -r each; do
    umount -l "$each"
done
rm -rf -- "$folder"
"""


@dataclass(frozen=True, slots=True)
class Engine:
    url: str
    folder: Path

    def client(self) -> docker.APIClient:
        return docker.APIClient(base_url=self.url, version="auto")

    def image(self, name: str = IMAGE) -> str:
        """The name of an image that is there."""
        api = self.client()
        try:
            api.inspect_image(name)
        except ImageNotFound:
            archive = root_filesystem.archive(python=name == PYTHON_IMAGE)
            repository, tag = name.split(":")
            api.import_image(str(archive), repository=repository, tag=tag)
        finally:
            api.close()
        return name


def why_not() -> str | None:
    """Why no engine can be started here: what it does first is not permitted."""
    if os.geteuid() != 0:
        return "a Docker engine of the tests' own needs root"
    tried = ["unshare", "--mount", "--pid", "--net", "--fork", "mount", "-t", "tmpfs", "-", "/mnt"]
    made = subprocess.run(tried, capture_output=True, text=True)
    if made.returncode != 0:
        return f"containers are not permitted here: {made.stderr.strip()}"
    return None


@contextmanager
def running() -> Iterator[Engine]:
    """Raises RuntimeError: it does not start; with the end of its log."""
    if shutil.which("dockerd", path=_path()) is None:
        debian_packages.install("docker.io")
    # Short: a socket's path has room for a hundred letters.
    folder = Path(tempfile.mkdtemp(prefix="tg-docker-"))
    guardian = subprocess.Popen(
        ["/bin/sh", "-c", _GUARDIAN, "sh", folder], stdin=subprocess.PIPE, start_new_session=True
    )
    assert guardian.stdin is not None
    started: list[subprocess.Popen[bytes]] = []
    try:
        engine = Engine(f"unix://{folder}/socket", folder)
        _start(engine, started)
        yield engine
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()
        guardian.stdin.close()
        guardian.wait()


def _start(engine: Engine, started: list[subprocess.Popen[bytes]]) -> None:
    folder = engine.folder
    config, address = folder / "containerd.toml", folder / "containerd.socket"
    config.write_text(_CONTAINERD.format(folder=folder))
    started.append(_daemon(folder, "containerd", "--config", str(config)))
    _wait(started[-1], folder, address.is_socket)
    started.append(
        _daemon(
            folder,
            *("dockerd", "--host", engine.url, "--containerd", str(address)),
            *("--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"),
            *("--pidfile", f"{folder}/pid", "--bridge=none", "--iptables=false"),
            *("--ip6tables=false", "--ip-forward=false", "--ip-masq=false"),
        )
    )
    _wait(started[-1], folder, lambda: _answers(engine))


def _daemon(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    with (folder / f"{command[0]}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PATH": _path()},
            start_new_session=True,  # a Ctrl-C is ours: they end when their users are through
        )


def _path() -> str:
    """Debian keeps daemons in folders that not every user's PATH has."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _answers(engine: Engine) -> bool:
    try:
        engine.client().close()
    except (DockerException, RequestException, OSError):
        return False
    return True


def _wait(process: subprocess.Popen[bytes], folder: Path, ready: Callable[[], bool]) -> None:
    """Raises RuntimeError, with the end of the logs."""
    deadline = time.monotonic() + _START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            logs = [log.read_text(errors="replace")[-2000:] for log in folder.glob("*.log")]
            raise RuntimeError("\n".join(logs))
        time.sleep(0.05)
