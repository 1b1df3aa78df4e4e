"""Sandboxes in a real Docker engine: what they hold, what they reach, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import docker
import pytest

import tracegrad
from support.engines.mock_engine import Answer, MockEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, proxy_with_engine
from support.proxy.servers import EngineServer, eventually, serving
from support.runner.anchored_agent import AnchoredAgent, call
from support.runner.runner_proxy import runner_proxy
from support.system import docker_engine
from support.system.docker_engine import Engine
from tracegrad.runner.agent_layer import AgentLayer
from tracegrad.runner.anchored_sandboxes import AnchoredSandboxes
from tracegrad.runner.docker_backend import DockerSandboxes, DockerSettings
from tracegrad.runner.docker_sandbox import DockerSandbox
from tracegrad.runner.outcomes import ProcessEnd
from tracegrad.runner.sandbox import (
    BrokenEnvironment,
    Sandbox,
    SandboxSpec,
    SandboxUnavailable,
)
from tracegrad.runner.sandbox_owner import OWNER_LABEL
from tracegrad.runner.warm_pool import WarmPool
from tracegrad.store import Store
from tracegrad.store.anchors.schedule import AnchorSettings

pytestmark = pytest.mark.docker

PROXY = "http://127.0.0.1:9"  # nobody listens there


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    if reason := docker_engine.why_not():
        pytest.skip(reason)
    with docker_engine.running() as found:
        yield found


@pytest.fixture
def api(engine: Engine) -> Iterator[docker.APIClient]:
    client = engine.client()
    yield client
    client.close()


@pytest.fixture
def spec(engine: Engine) -> SandboxSpec:
    return SandboxSpec(image=engine.image())


@pytest.fixture
async def backend(
    engine: Engine, api: docker.APIClient, tmp_path: Path
) -> AsyncIterator[DockerSandboxes]:
    found = backend_of(engine, tmp_path)
    yield found
    await found.close()
    assert api.containers(all=True) == [], "nothing is left"


def backend_of(engine: Engine, folder: Path, proxy: str = PROXY, **more: Any) -> DockerSandboxes:
    settings = DockerSettings(
        proxy=proxy, engine=engine.url, build_network="none", pull=False, locks=folder / "locks"
    )
    return DockerSandboxes(replace(settings, **more))


async def run(
    sandbox: Sandbox,
    command: Sequence[str] | str,
    output: Path,
    *,
    timeout_s: float | None = None,
    **environ: str | None,
) -> tuple[ProcessEnd, str]:
    end = await sandbox.run(
        command, environ=environ, timeout_s=timeout_s, output=output / "output", marker="none"
    )
    return end, (output / "output").read_text()


def processes(api: docker.APIClient, sandbox: DockerSandbox) -> list[str]:
    """Commands in the container but the first; zombies are none."""
    first = api.inspect_container(sandbox.container)["State"]["Pid"]
    found = api.top(sandbox.container, ps_args="-eo pid,stat,args")["Processes"]
    return [args for pid, stat, args in found if int(pid) != first and stat[0] != "Z"]


async def test_a_command_runs_in_its_folder_and_says_how_it_ended(
    backend: DockerSandboxes, spec: SandboxSpec, tmp_path: Path
) -> None:
    sandbox = await backend.start(replace(spec, workdir="/work"))
    end, said = await run(sandbox, 'pwd; echo "$A"; echo e >&2; exit 3', tmp_path, A="b")
    # The two streams come by two ways.
    assert (end.exit_code, sorted(said.split())) == (3, ["/work", "b", "e"])
    end, said = await run(sandbox, ["env"], tmp_path, HOSTNAME=None)
    assert "HOSTNAME=" not in said
    assert "PATH=" in said
    end, said = await run(sandbox, ["no-such-program"], tmp_path)
    assert end.exit_code is None
    assert "no-such-program" in (end.error or "")
    for code in (126, 127, 137):
        end, _ = await run(sandbox, f"echo 'executable file not found'; exit {code}", tmp_path)
        assert (end.exit_code, end.error, end.out_of_memory) == (code, None, False)


async def test_a_proxy_that_docker_is_set_up_with_stays_outside(
    backend: DockerSandboxes, spec: SandboxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxies = {"default": {"httpProxy": "http://proxy.example:3128"}}
    (tmp_path / "config.json").write_text(json.dumps({"proxies": proxies}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    _, said = await run(await backend.start(spec), ["env"], tmp_path)
    assert "proxy.example" not in said


STUBBORN = (
    "trap '' TERM; (trap '' TERM; while :; do sleep 1; done) & echo up; while :; do sleep 1; done"
)


@pytest.mark.parametrize("how", ["timeout", "cancel", "end"])
async def test_nothing_of_a_command_is_left(
    backend: DockerSandboxes,
    api: docker.APIClient,
    spec: SandboxSpec,
    tmp_path: Path,
    how: str,
) -> None:
    sandbox = await backend.start(spec)
    if how == "end":
        end, _ = await run(sandbox, "(sleep 1000 &) ; setsid sleep 1000 & exit 0", tmp_path)
        assert end.exit_code == 0
    elif how == "timeout":
        end, _ = await run(sandbox, STUBBORN, tmp_path, timeout_s=1)
        assert (end.exit_code, end.timed_out) == (None, True)
    else:
        up = asyncio.Event()
        running = asyncio.create_task(
            sandbox.run(
                STUBBORN,
                environ={},
                timeout_s=None,
                output=tmp_path / "output",
                marker="none",
                echo=lambda some: up.set(),
            )
        )
        await up.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert processes(api, sandbox) == []
    assert (await run(sandbox, "echo again", tmp_path))[1] == "again\n"


async def test_a_fork_bomb_is_bounded_and_ended_and_the_sandbox_lives(
    backend: DockerSandboxes, api: docker.APIClient, spec: SandboxSpec, tmp_path: Path
) -> None:
    sandbox = await backend.start(replace(spec, pids=24))
    bomb = "b() { b & b; }; while :; do b 2>/dev/null & sleep 0.1; done"
    await run(sandbox, bomb, tmp_path, timeout_s=2)
    assert processes(api, sandbox) == []
    # Zombies count for the bound: they are reaped before the next command begins.
    assert (await run(sandbox, "ls / | wc -l", tmp_path))[0].exit_code == 0


async def test_an_agent_cannot_end_its_own_container(
    backend: DockerSandboxes, spec: SandboxSpec, tmp_path: Path
) -> None:
    """It would be a failure of the machine's, and nobody would score it."""
    sandbox = await backend.start(spec)
    await run(sandbox, "for s in $(seq 31); do kill -$s 1; done; kill -9 -1", tmp_path)
    assert await sandbox.alive()
    assert (await run(sandbox, "kill -9 $$", tmp_path))[0].exit_code == 137


async def test_bounds_are_the_engines_own(
    backend: DockerSandboxes, api: docker.APIClient, spec: SandboxSpec, tmp_path: Path
) -> None:
    sandbox = await backend.start(replace(spec, memory_mb=32, cpus=0.5, pids=20))
    end, _ = await run(sandbox, ["tail", "/dev/zero"], tmp_path)
    assert (end.exit_code, end.out_of_memory) == (137, True)
    assert "memory" in end.describe()
    host = api.inspect_container(sandbox.container)["HostConfig"]
    assert (host["NanoCpus"], host["PidsLimit"]) == (500_000_000, 21)
    assert (host["Memory"], host["MemorySwap"]) == (32 << 20, 32 << 20)


async def test_who_is_not_root_writes_only_its_own(
    backend: DockerSandboxes, spec: SandboxSpec, tmp_path: Path
) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "file").write_text("given")
    sandbox = await backend.start(
        replace(spec, user="agent", workdir="/work", workspace=tmp_path / "given")
    )
    end, said = await run(sandbox, "id -u; id -g; cat file; echo new > file; touch /x", tmp_path)
    assert "1000\n1000\ngiven" in said  # the two streams come in any order
    assert end.exit_code != 0
    await sandbox.upload(tmp_path / "given" / "file", "/tmp/home/.config/file")
    assert (await run(sandbox, "touch /tmp/home/.config/more", tmp_path))[0].exit_code == 0


@pytest.mark.parametrize("user", [None, "1000:1000"])
async def test_an_agent_that_removed_its_folder_is_scored(
    backend: DockerSandboxes, spec: SandboxSpec, tmp_path: Path, user: str | None
) -> None:
    sandbox = await backend.start(replace(spec, user=user, workdir="/tmp/a/work"))
    assert (await run(sandbox, "rm -rf /tmp/a || rm -rf /tmp/a/work", tmp_path))[0].error is None
    end, _ = await run(sandbox, "touch b && test -e a", tmp_path)
    assert (end.exit_code, end.error) == (1, None)


async def test_a_read_only_one_keeps_two_folders_writable(
    backend: DockerSandboxes, spec: SandboxSpec, tmp_path: Path
) -> None:
    sandbox = await backend.start(replace(spec, read_only=True, workdir="/work", user="1000:1000"))
    end, _ = await run(sandbox, "touch /tmp/a a && ! touch /etc/a", tmp_path)
    assert end.exit_code == 0
    (tmp_path / "file").write_text("x")
    await sandbox.upload(tmp_path / "file", "deep/file")
    await sandbox.upload(tmp_path / "file", "/tmp/deep/file")
    assert (await run(sandbox, "cat deep/file /tmp/deep/file", tmp_path))[1] == "xx"
    with pytest.raises(BrokenEnvironment, match="read-only"):
        await sandbox.upload(tmp_path / "file", "/etc/file")
    with pytest.raises(BrokenEnvironment, match="read_only"):
        await sandbox.snapshot()


async def test_files_go_in_and_come_out(
    backend: DockerSandboxes, spec: SandboxSpec, tmp_path: Path
) -> None:
    sandbox = await backend.start(spec)
    await run(sandbox, "mkdir -p out/a; echo 1 > out/a/b; ln -s /etc/passwd out/link", tmp_path)
    await sandbox.download("out", tmp_path / "here")
    assert [str(p.relative_to(tmp_path / "here")) for p in sorted((tmp_path / "here").rglob("*"))
            ] == ["a", "a/b"]  # fmt: skip
    for missing in ("none", "out/link"):
        with pytest.raises(FileNotFoundError):
            await sandbox.download(missing, tmp_path / "none")
    with pytest.raises(BrokenEnvironment, match="No such file"):
        await sandbox.upload(tmp_path / "none", "x")


async def test_a_snapshot_begins_where_the_other_one_was(
    backend: DockerSandboxes, api: docker.APIClient, spec: SandboxSpec, tmp_path: Path
) -> None:
    """The state behind a prefix of tool calls, for as many attempts as are wanted."""
    first = await backend.start(replace(spec, workdir="/work", user="1000:1000"))
    await run(first, "echo turn 1 > log", tmp_path)
    prefix = await first.snapshot()
    await run(first, "echo turn 2 >> log", tmp_path)
    made = [await backend.start(prefix.spec) for _ in range(2)]
    for again in made:
        assert (await run(again, "cat log; pwd; id -u; echo other >> log", tmp_path))[1] == (
            "turn 1\n/work\n1000\n"
        )
    await prefix.remove()  # once nothing is made of it any more
    assert prefix.spec.image in api.images(quiet=True)
    for again in made:
        await again.close()
    assert prefix.spec.image not in api.images(quiet=True)
    await (await backend.start(spec)).snapshot()
    before = len(api.images(quiet=True))
    await backend.close()
    assert len(api.images(quiet=True)) < before


async def test_an_anchor_that_is_rolled_again_starts_from_its_containers_state(
    engine: Engine,
    api: docker.APIClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the warm pool, as a run has it: its next container is of the snapshot, too."""
    settings = AnchorSettings(window=1, group_size=1)
    agent, spec = AnchoredAgent(), SandboxSpec(image=engine.image(), workdir="/work")
    with runner_proxy(tmp_path, monkeypatch, anchors=settings) as proxy:
        pool = WarmPool(backend_of(engine, tmp_path, proxy.url), size=1, total=2)
        sandboxes = AnchoredSandboxes(pool, agent.act)

        async def roll(reward: float, *replies: Answer) -> int:
            proxy.engine.replies += replies
            async with sandboxes.rollout("fix", spec) as one:
                await agent.solve(one, "fix it")
                one.rollout.reward(reward)
            await asyncio.to_thread(tracegrad.flush)
            return one.anchor

        prefix = ["echo 1 > log; echo 1 > /etc/outside", "cat log; echo 2 >> log"]
        assert await roll(1.0, *map(call, prefix)) == 0
        agent.ran.clear()
        look = "cat log /etc/outside; rm log"
        assert [await roll(0.0, call(look)) for _ in range(2)] == [2, 2]
        assert agent.ran == [*prefix, look, look], "replayed once"
        seen = [said["messages"][-1]["content"] for said in proxy.engine.requests[-4:]]
        assert seen == [seen[0], "0 1\n2\n1\n"] * 2
        images = len(api.images(quiet=True))
        await pool.close()
    assert api.containers(all=True) == []
    assert len(api.images(quiet=True)) == images - 1


async def test_what_an_image_keeps_in_volumes_is_in_no_snapshot(
    backend: DockerSandboxes, api: docker.APIClient, spec: SandboxSpec
) -> None:
    """Silently, attempts would begin in another state than the prefix's."""
    made = api.create_container(spec.image, ["true"])["Id"]
    image = api.commit(made, changes=["VOLUME /data"])["Id"]
    api.remove_container(made)
    sandbox = await backend.start(replace(spec, image=image))
    with pytest.raises(BrokenEnvironment, match="VOLUME: what is written to /data"):
        await sandbox.snapshot()
    await backend.close()
    api.remove_image(image)


# What is reached


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[ProxyWithEngine]:
    Store.open(f"sqlite:///{tmp_path}/store.db").close()
    server = EngineServer()
    with (
        serving(server, lifespan="off") as server.url,
        proxy_with_engine(server, MockEngine(), tmp_path / "store.db") as found,
    ):
        yield found
        found.close_clients()


ASK = """
import json, os, sys, urllib.request
body = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
request = urllib.request.Request(
    os.environ["BASE"] + "/chat/completions", json.dumps(body).encode(),
    {"content-type": "application/json"})
for line in urllib.request.urlopen(request):
    if line.strip(): print(line.decode().strip())
"""
REWARD = """
import json, os, urllib.error, urllib.request
event = {"type": "reward", "rollout_id": "r1", "value": 1.0}
request = urllib.request.Request(
    os.environ["ROOT"] + "/api/events", json.dumps({"events": [event]}).encode(),
    {"content-type": "application/json"})
try: print(urllib.request.urlopen(request).status)
except urllib.error.HTTPError as error: print(error.code)
"""
# Every address that there is, as far as a program can see, and some that there are not.
REACH = """
import os, socket
print(sorted(os.listdir("/sys/class/net")))
for host, port in (("127.0.0.1", int(os.environ["OTHER"])), ("1.1.1.1", 53), ("172.17.0.1", 80),
                   (os.environ["HOST_ADDRESS"], int(os.environ["OTHER"])), ("::1", 80)):
    try:
        socket.create_connection((host, port), 5).close()
        print("reached", host)
    except OSError as error:
        pass
try: socket.getaddrinfo("example.com", 80); print("resolved")
except OSError: pass
"""


def host_address() -> str:
    """This machine's, at some network; nothing is sent for it."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:  # it has none
            return "127.0.0.1"
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("network", ["namespace", "internal"])
async def test_calls_are_streamed_and_no_reward_is_taken(
    engine: Engine, proxy: ProxyWithEngine, tmp_path: Path, network: str
) -> None:
    backend = backend_of(engine, tmp_path, proxy.url, network=network)
    sandbox = await backend.start(SandboxSpec(image=engine.image(docker_engine.PYTHON_IMAGE)))
    base = sandbox.reachable(f"{proxy.url}/rollouts/r1/v1")
    end, said = await run(sandbox, ["python3", "-c", ASK], tmp_path, BASE=base)
    assert end.exit_code == 0, said
    assert said.count("data: ") > 2
    assert said.endswith("data: [DONE]\n")
    assert len(proxy.turns_of("r1")) == 1
    _, said = await run(
        sandbox, ["python3", "-c", REWARD], tmp_path, ROOT=sandbox.reachable(proxy.url)
    )
    assert said == "403\n"
    await backend.close()


async def test_nothing_else_is_reached(
    engine: Engine, backend: DockerSandboxes, tmp_path: Path
) -> None:
    listening = await asyncio.start_server(lambda *_: None, "0.0.0.0", 0)
    port = listening.sockets[0].getsockname()[1]
    sandbox = await backend.start(SandboxSpec(image=engine.image(docker_engine.PYTHON_IMAGE)))
    end, said = await run(
        sandbox,
        ["python3", "-c", REACH],
        tmp_path,
        OTHER=str(port),
        HOST_ADDRESS=host_address(),
    )
    assert (end.exit_code, said) == (0, "['lo']\n")
    with pytest.raises(ValueError, match="cannot be reached"):
        sandbox.reachable(f"http://127.0.0.1:{port}/v1")
    listening.close()


async def test_a_mirror_is_reached_beside_the_proxy(
    engine: Engine, backend: DockerSandboxes, spec: SandboxSpec, tmp_path: Path
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": f"mirror {scope['path']}\n".encode()})

    with serving(app, lifespan="off") as url:
        sandbox = await backend.start(replace(spec, mirror=f"{url}/simple/"))
        command = 'wget -q -O - "$TRACEGRAD_MIRROR"package'
        assert (await run(sandbox, command, tmp_path))[1] == "mirror /simple/package\n"
    with pytest.raises(BrokenEnvironment, match="mirror"):
        await backend.start(replace(spec, mirror="nonsense"))


# Images


DOCKERFILE = "FROM {image}\nWORKDIR /srv\nCOPY file .\nRUN echo built >> file\nUSER 1000\n"


async def test_an_image_is_built_once_from_a_folder(
    engine: Engine, backend: DockerSandboxes, api: docker.APIClient, tmp_path: Path
) -> None:
    folder = tmp_path / "image"
    folder.mkdir()
    (folder / "file").write_text("given\n")
    (folder / "Dockerfile").write_text(DOCKERFILE.format(image=engine.image()))
    spec = SandboxSpec(build=folder)
    sandbox = await backend.start(spec)
    assert (await run(sandbox, "cat file; pwd; id -u", tmp_path))[1] == "given\nbuilt\n/srv\n1000\n"
    ids = {api.inspect_container((await backend.start(spec)).container)["Image"]}
    os.utime(folder / "file", (0, 0))  # a clone has other times, and the same image
    other = backend_of(engine, tmp_path)
    ids |= {api.inspect_container((await other.start(spec)).container)["Image"]}
    assert len(ids) == 1
    (folder / "file").write_text("changed\n")
    third = backend_of(engine, tmp_path)
    assert "changed" in (await run(await third.start(spec), "cat file", tmp_path))[1]
    for each in (other, third):
        await each.close()


@pytest.mark.parametrize(
    ("dockerfile", "said"),
    [("FROM {image}\nRUN echo why >&2; exit 7\n", "why.*7"), (None, "no Dockerfile")],
)
async def test_one_that_does_not_build_is_the_environments_own_fault(
    engine: Engine, backend: DockerSandboxes, tmp_path: Path, dockerfile: str | None, said: str
) -> None:
    if dockerfile is not None:
        (tmp_path / "Dockerfile").write_text(dockerfile.format(image=engine.image()))
    for _ in range(2):  # it is not built twice
        with pytest.raises(BrokenEnvironment, match=said):
            await backend.start(SandboxSpec(build=tmp_path))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"image": "no-such-image:1"}, "no-such-image"),
        ({"user": "nobody-here"}, "nobody-here"),
        ({"memory_mb": 1}, "memory"),
    ],
)
async def test_what_the_image_cannot_is_the_environments_own_fault(
    backend: DockerSandboxes, spec: SandboxSpec, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(BrokenEnvironment, match=said):
        await backend.start(replace(spec, **wrong))


async def test_an_agent_is_baked_once_and_as_the_image_was(
    engine: Engine, api: docker.APIClient, tmp_path: Path
) -> None:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "agent").write_text("#!/bin/sh\necho agent\n")
    layer = AgentLayer(
        id="agent@1",
        files={"/opt/agent": tmp_path / "programs"},
        lines=("chmod 755 /opt/agent/agent", "date +%s%N > /opt/when"),
    )
    backends = [backend_of(engine, tmp_path, layer=lambda recipe: layer) for _ in range(2)]
    spec = SandboxSpec(image=engine.image(), recipe="agent@1")
    sandboxes = await asyncio.gather(*(backend.start(spec) for backend in backends))
    said = [(await run(each, "/opt/agent/agent; cat /opt/when", tmp_path))[1] for each in sandboxes]
    assert said[0].startswith("agent\n")
    assert said[0] == said[1], "two runs bake once"
    image = api.inspect_image(api.inspect_container(sandboxes[0].container)["Image"])
    assert image["Config"]["Labels"][OWNER_LABEL] == "", "made of ours, it is not ours"
    for backend in backends:
        await backend.close()
    failing = replace(layer, lines=("echo the reason >&2", "exit 9"))
    backend = backend_of(engine, tmp_path, layer=lambda recipe: failing)
    with pytest.raises(BrokenEnvironment, match=r"agent@1.*9: the reason"):
        await backend.start(spec)
    await backend.close()
    assert api.containers(all=True) == []


# What is left, and what is lost


RUNNER = """
import asyncio, sys
from pathlib import Path
from tracegrad.runner.docker_backend import DockerSandboxes, DockerSettings
from tracegrad.runner.sandbox import SandboxSpec

async def main(engine, image, network):
    backend = DockerSandboxes(DockerSettings(
        proxy="http://127.0.0.1:9", engine=engine, network=network, pull=False))
    sandbox = await backend.start(SandboxSpec(image=image))
    await sandbox.snapshot()
    print(sandbox.container, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main(*sys.argv[1:]))
"""


def runner(engine: Engine, network: str) -> tuple[subprocess.Popen[str], str]:
    """Another one, and its container."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER, engine.url, engine.image(), network],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


async def test_what_a_killed_runner_left_is_removed_and_a_living_ones_stays(
    engine: Engine, api: docker.APIClient, tmp_path: Path
) -> None:
    killed, left = runner(engine, "internal")
    living, kept = runner(engine, "namespace")
    foreign = api.create_container(engine.image(), ["true"], labels={OWNER_LABEL: "not:ours:1:1"})
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert api.inspect_container(left)["State"]["Running"], "it outlives its runner"
    backend = backend_of(engine, tmp_path)
    await backend.start(SandboxSpec(image=engine.image()))
    there = {each["Id"] for each in api.containers(all=True)}
    assert left not in there
    assert {kept, foreign["Id"]} <= there
    assert [n for n in api.networks() if n["Name"].startswith("tracegrad-")] == []
    await backend.close()
    living.kill()
    living.wait()
    last = backend_of(engine, tmp_path)
    await last.start(SandboxSpec(image=engine.image()))
    await last.close()
    api.remove_container(foreign["Id"])
    assert api.containers(all=True) == []
    assert not any(OWNER_LABEL in (i["Labels"] or {}) and i["Labels"][OWNER_LABEL]
                   for i in api.images())  # fmt: skip


async def test_a_container_that_is_lost_is_the_machines_doing(
    backend: DockerSandboxes, api: docker.APIClient, spec: SandboxSpec, tmp_path: Path
) -> None:
    sandbox = await backend.start(spec)
    asyncio.get_running_loop().call_later(
        0.5, lambda: api.remove_container(sandbox.container, force=True)
    )
    with pytest.raises(SandboxUnavailable, match="container"):
        await run(sandbox, "sleep 1000", tmp_path)
    assert not await sandbox.alive()
    (tmp_path / "file").touch()
    for next_one in (
        run(sandbox, "true", tmp_path),
        sandbox.upload(tmp_path / "file", "file"),
        sandbox.download("file", tmp_path / "copy"),
    ):
        with pytest.raises(SandboxUnavailable, match="No such container"):
            await next_one
    await sandbox.close()


async def test_what_a_program_prints_is_not_the_engines_word(
    backend: DockerSandboxes, spec: SandboxSpec, tmp_path: Path
) -> None:
    sandbox = await backend.start(spec)
    lie = "OCI runtime exec failed: exec failed: unable to start container process: unknown"
    end, _ = await run(sandbox, f"echo '{lie}'; exit 126", tmp_path)
    assert (end.exit_code, end.error) == (126, None)


async def test_output_that_comes_with_the_answers_head_is_kept(
    backend: DockerSandboxes, spec: SandboxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where this process is busy, a short command has ended before its answer's head is read."""
    sandbox = await backend.start(spec)
    getresponse = HTTPConnection.getresponse

    def late(self: HTTPConnection) -> HTTPResponse:
        time.sleep(0.5)
        return getresponse(self)

    monkeypatch.setattr(HTTPConnection, "getresponse", late)
    end, said = await run(sandbox, "echo first; echo 0.5", tmp_path)
    assert (said, end.last_line) == ("first\n0.5\n", "0.5")


async def test_a_full_disk_is_the_machines_doing_and_holds_nobody_up(
    backend: DockerSandboxes, spec: SandboxSpec, tmp_path: Path
) -> None:
    sandbox = await backend.start(spec)
    (tmp_path / "output").symlink_to("/dev/full")
    with pytest.raises(SandboxUnavailable, match="could not be kept: No space"):
        await run(sandbox, "head -c 3000000 /dev/zero", tmp_path)


async def test_a_start_that_is_given_up_leaves_nothing(
    engine: Engine, api: docker.APIClient, spec: SandboxSpec, tmp_path: Path
) -> None:
    backend = backend_of(engine, tmp_path)
    await backend.start(spec)
    for turns in range(0, 40, 4):
        starting = asyncio.create_task(backend.start(spec))
        for _ in range(turns):
            await asyncio.sleep(0.005)
        starting.cancel()
        await asyncio.wait([starting])  # one that was faster is closed with the backend
    await backend.close()
    assert api.containers(all=True) == []


async def test_no_engine_is_said_with_its_fix(tmp_path: Path) -> None:
    backend = DockerSandboxes(DockerSettings(proxy=PROXY, engine=f"unix://{tmp_path}/none"))
    with pytest.raises(SandboxUnavailable, match="DOCKER_HOST"):
        await backend.start(SandboxSpec(image="x"))
    await backend.close()


# The warm pool, with containers


async def test_the_pool_hands_out_living_containers_and_drains(
    engine: Engine, api: docker.APIClient, spec: SandboxSpec, tmp_path: Path
) -> None:
    pool = WarmPool(backend_of(engine, tmp_path), size=2, total=4)
    first = await pool.start(spec)
    async with asyncio.timeout(120):
        while pool.ready(spec) < 2:  # noqa: ASYNC110 (while `first` is used)
            await asyncio.sleep(0.05)
    assert isinstance(first, DockerSandbox)
    ready = {each["Id"] for each in api.containers()} - {first.container}
    for each in ready:
        api.kill(each)
    second = await pool.start(spec)
    assert isinstance(second, DockerSandbox)
    assert second.container not in ready
    assert (await run(second, "echo lives", tmp_path))[1] == "lives\n"
    await first.close()
    await pool.close()
    assert api.containers(all=True) == []


async def test_a_resettable_one_comes_back_as_it_began(
    engine: Engine, spec: SandboxSpec, tmp_path: Path
) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "file").write_text("given")
    wanted = replace(
        spec, resettable=True, workspace=tmp_path / "given", workdir="/work", user="1000:1000"
    )
    pool = WarmPool(backend_of(engine, tmp_path), size=1, total=1)
    seen: set[str] = set()
    for _ in range(3):
        sandbox = await pool.start(wanted)
        assert isinstance(sandbox, DockerSandbox)
        seen.add(sandbox.container)
        _, said = await run(sandbox, "cat file; ls -A . /tmp; id -u", tmp_path)
        assert said == "given.:\nfile\n\n/tmp:\n1000\n"
        await run(
            sandbox, "echo x > file; touch .hidden /tmp/a; sleep 9 >/dev/null 2>&1 &", tmp_path
        )
        await sandbox.close()
        async with asyncio.timeout(120):
            while pool.ready(wanted) == 0:  # noqa: ASYNC110 (it is reset in the background)
                await asyncio.sleep(0.02)
    assert len(seen) == 1
    await pool.close()


# By the command

RUN_AGENT = """
import os, urllib.request
body = b'{"model": "policy", "messages": [{"role": "user", "content": "hello"}]}'
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
    {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
urllib.request.urlopen(request).read()
open("answer", "w").write(os.popen("id -u").read())
"""


def test_tracegrad_run_has_each_attempt_in_a_container_of_its_own(
    engine: Engine, proxy: ProxyWithEngine, api: docker.APIClient, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "agent.py").write_text(RUN_AGENT)
    command = [
        *(sys.executable, "-m", "tracegrad", "run", "-n", "3", "--task", "contained", "--json"),
        *("--image", engine.image(docker_engine.PYTHON_IMAGE), "--workspace", tmp_path / "work"),
        *("--user", "1000:1000", "--memory", "256", "--cpus", "1", "--pids", "64", "--read-only"),
        *("--reward", 'test "$(cat answer)" = 1000 && test -s "$TRACEGRAD_OUTPUT" || exit 1'),
        *("--", "sh", "-c", "python3 agent.py && echo done"),
    ]
    environ = {**os.environ, "TRACEGRAD_URL": proxy.url, "DOCKER_HOST": engine.url}
    environ.pop("TRACEGRAD_API_KEY", None)
    result = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [row for row in proxy.store.rollouts(limit=None) if row.task_id == "contained"]
    assert [(row.outcome, row.reward) for row in rows] == [("completed", 1.0)] * 3
    assert api.containers(all=True) == []


@pytest.mark.parametrize("warm", ["0", "2"])
def test_an_interrupt_does_not_wait_for_an_image(
    engine: Engine, proxy: ProxyWithEngine, api: docker.APIClient, tmp_path: Path, warm: str
) -> None:
    """And the engine gives up the build that nobody listens to."""
    image = engine.image()
    (tmp_path / "Dockerfile").write_text(f"FROM {image}\nRUN sleep 100{warm}\n")
    environ = {**os.environ, "TRACEGRAD_URL": proxy.url, "DOCKER_HOST": engine.url}
    environ.pop("TRACEGRAD_API_KEY", None)
    command = [sys.executable, "-m", "tracegrad", "run", "--build", ".", "--warm", warm]
    with subprocess.Popen([*command, "--", "true"], cwd=tmp_path, env=environ) as running:
        eventually(lambda: api.containers(), 60)
        running.send_signal(signal.SIGINT)
        assert running.wait(120) == 130
    eventually(lambda: api.containers(all=True) == [], 60)
