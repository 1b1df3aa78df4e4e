"""`tracegrad run --ray`: sandboxes on a cluster of two hosts, one of which is killed; and what is
refused before."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.servers import eventually
from support.runner.asking_agent import SOURCE
from support.runner.ray_cluster import ray_cluster
from tracegrad.cli.app import app
from tracegrad.runner import ray_cluster as cluster_module
from tracegrad.runner.ray_backend import RaySandboxes, RaySettings
from tracegrad.runner.sandbox import SandboxSpec
from tracegrad.store import RolloutSummary

# Asks the model, then waits for the file that its task names; one process, which ends with Ray's.
WAITS = f"{SOURCE}\nimport sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\n"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments])


def tasks_file(*lines: Mapping[str, Any]) -> str:
    Path("tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "tasks.jsonl"


def test_a_lost_host_costs_its_attempts_and_they_are_made_again(
    proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    """Each host has room for one agent. What tasks bring along, and what scores them, is sent."""
    gate = tmp_path / "gate"
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "given.txt").write_text("given")
    (tmp_path / "check").write_text('grep -q asked "$TRACEGRAD_OUTPUT" && cat answer.txt given.txt')
    spec = {
        "command": [sys.executable, "-c", WAITS, str(gate)],
        "workspace": str(tmp_path / "repo"),
        "reward": 'test "$(sh tests/check)" = okgiven && echo 0.5 > out/reward.txt',
        "reward_file": "out/reward",
        "reward_uploads": {str(tmp_path / "check"): "tests/check"},
    }
    path = tasks_file({"id": "a", **spec}, {"id": "b", **spec})
    lost: list[BaseException] = []

    def rows() -> list[RolloutSummary]:
        return list(proxy.store.rollouts(limit=None))

    def lose_one(cluster: Any) -> None:
        """Once both agents have asked; the other goes on when that is noticed."""
        try:
            eventually(lambda: sum(row.turns for row in rows()) == 2, 120)
            cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
            eventually(lambda: any(row.outcome == "infra_error" for row in rows()), 120)
        except BaseException as error:
            lost.append(error)
        finally:
            gate.touch()

    with ray_cluster(2) as cluster:
        loser = threading.Thread(target=lose_one, args=[cluster])
        loser.start()
        # A process of its own: Ray ends the one that uses it where it loses its own host.
        command = [sys.executable, "-m", "tracegrad", "run", path, "--concurrency=2", "--json"]
        ray = ["--ray", cluster.address]
        done = subprocess.run([*command, *ray], capture_output=True, text=True, check=False)
        loser.join()
    assert lost == []
    assert done.returncode == 0, done.stderr
    ended = eventually(lambda: all(row.outcome for row in rows()) and rows(), 60)
    assert Counter((str(row.outcome), row.reward) for row in ended) == {
        ("completed", 0.5): 2,
        ("infra_error", None): 1,
    }
    [gone] = [row for row in ended if row.outcome == "infra_error"]
    assert gone.error is not None
    assert "is lost" in gone.error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ray-resource", "CPU=2"], "--ray-resource: there is no --ray"),
        (["--ray", "auto", "--ray-resource", "CPU"], "'CPU' is not NAME=AMOUNT"),
        (["--ray", "auto", "--ray-resource", "CPU=-1"], "'CPU=-1' is not NAME=AMOUNT"),
        (["--ray", "auto", "--ray-resource", "=1"], "'=1' is not NAME=AMOUNT"),
        (["--ray", "ray://127.0.0.1:1"], "run on a host of the cluster"),
        (["--ray", "127.0.0.1:1"], "--ray 127.0.0.1:1: nobody is there: [Errno 111]"),
        (["--ray", "127.0.0.1:http"], "--ray 127.0.0.1:http: nobody is there"),
    ],
)
def test_wrong_options_are_named(proxy: ProxyWithEngine, arguments: list[str], said: str) -> None:
    result = run(*arguments, "--", "true")
    assert result.exit_code == 2
    assert said in result.output


def test_without_ray_it_says_what_to_install(
    proxy: ProxyWithEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(cluster_module, "find_spec", lambda name: None)
    result = run("--ray", "auto", "--", "true")
    assert result.exit_code == 2
    assert "pip install 'tracegrad[ray]'" in result.output


class Cluster:
    """As far as `connect` sees one."""

    def __init__(self, *nodes: tuple[str, dict[str, float]]) -> None:
        self._nodes = nodes

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "NodeManagerAddress": address, "Resources": resources}
            for address, resources in self._nodes
        ]


def connect(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster, *specs: SandboxSpec, **settings: Any
) -> int:
    monkeypatch.setattr(cluster_module, "_connected", lambda *given: (cluster, False))
    monkeypatch.setattr(cluster_module, "_own_addresses", lambda: {"192.0.2.1"})
    given = {"address": "auto", "proxy": "http://192.0.2.1:4141", **settings}
    return RaySandboxes(RaySettings(**given)).connect(specs)


HOST, OTHER = ("192.0.2.1", {"CPU": 4.0}), ("192.0.2.2", {"CPU": 2.0, "memory": 2.0**30})


def test_room_is_that_of_the_largest_task(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Cluster(HOST, OTHER)
    small, large = SandboxSpec(), SandboxSpec(image="i", cpus=2)
    assert connect(monkeypatch, both, small) == 6
    assert connect(monkeypatch, both, small, large) == 3
    assert connect(monkeypatch, both, small, resources={"CPU": 0.5}) == 12
    assert connect(monkeypatch, both, SandboxSpec(memory_mb=512)) == 2
    with pytest.raises(ValueError, match="no host of the cluster has CPU 1, GPU 1"):
        connect(monkeypatch, both, small, resources={"GPU": 1})


def test_what_the_hosts_cannot_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = {"proxy": "http://127.0.0.1:4141"}
    assert connect(monkeypatch, Cluster(HOST), SandboxSpec(), **loopback) == 4
    with pytest.raises(ValueError, match=r"TRACEGRAD_URL: .* 192\.0\.2\.2 is not"):
        connect(monkeypatch, Cluster(HOST, OTHER), SandboxSpec(), **loopback)
    with pytest.raises(ValueError, match="codex@1 is installed on this machine alone"):
        connect(monkeypatch, Cluster(HOST), SandboxSpec(recipe="codex@1"))
