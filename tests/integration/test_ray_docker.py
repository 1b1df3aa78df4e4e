"""`tracegrad run --ray` with images: containers of a real engine, on a cluster of two hosts, one of
which is lost."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.servers import eventually
from support.runner.ray_cluster import ray_cluster
from support.runner.runner_proxy import runner_proxy
from support.system import docker_engine
from support.system.docker_engine import Engine
from tracegrad.cli.app import app

pytestmark = pytest.mark.docker

# Asks the model by busybox's own means.
ASK = """
set -e
test "$(ls /sys/class/net)" = lo
wget -q -O answer.json --header 'Content-Type: application/json' \
    --header "Authorization: Bearer $OPENAI_API_KEY" \
    --post-data '{"model": "policy", "messages": [{"role": "user", "content": "hello"}]}' \
    "$OPENAI_BASE_URL/chat/completions"
echo asked
"""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Both hosts', which have it from their environment."""
    if reason := docker_engine.why_not():
        pytest.skip(reason)
    with docker_engine.running() as found:
        monkeypatch.setenv("DOCKER_HOST", found.url)
        yield found


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyWithEngine]:
    with runner_proxy(tmp_path, monkeypatch) as found:
        yield found


def test_containers_run_on_hosts_and_a_lost_one_is_made_up_for(
    engine: Engine, proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "given.txt").write_text("given")
    (tmp_path / "check").write_text('grep -q asked "$TRACEGRAD_OUTPUT" && cat given.txt')
    spec = {
        "command": ["/bin/sh", "-c", ASK],
        "image": engine.image(),
        "workdir": "/work",
        "user": "1000:1000",
        "pids": 64,
        "workspace": str(tmp_path / "repo"),
        "reward": 'test "$(sh /checks/check)" = given && grep -q ok answer.json && echo 0.5 >'
        " reward.txt",
        "reward_file": "reward",
        "reward_uploads": {str(tmp_path / "check"): "/checks/check"},
    }
    Path("tasks.jsonl").write_text("".join(json.dumps({"id": id, **spec}) + "\n" for id in "ab"))
    api = engine.client()
    answers = proxy.engine.wait_before(0)
    failed: list[BaseException] = []
    bounds: list[int] = []

    def rows() -> list[Any]:
        return list(proxy.store.rollouts(limit=None))

    def lose_one(cluster: Any) -> None:
        """Each host has room for one: with two that wait for the model, both have one."""
        try:
            eventually(lambda: len(proxy.engine.requests) == 2, 240)
            for found in api.containers():
                bounds.append(api.inspect_container(found["Id"])["HostConfig"]["PidsLimit"])
            cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
            eventually(lambda: any(row.outcome == "infra_error" for row in rows()), 240)
        except BaseException as error:
            failed.append(error)
        finally:
            answers.set()

    with ray_cluster(2) as cluster:
        loser = threading.Thread(target=lose_one, args=[cluster])
        loser.start()
        arguments = ["run", "tasks.jsonl", "--ray", cluster.address, "--concurrency", "2"]
        result = CliRunner().invoke(app, arguments)
        loser.join()
    assert failed == []
    assert result.exit_code == 0, result.output
    assert bounds == [65, 65], "two containers at once, bounded by their host's engine"
    ended = eventually(lambda: all(row.outcome for row in rows()) and rows(), 60)
    assert Counter((str(row.outcome), row.reward) for row in ended) == {
        ("completed", 0.5): 2,
        ("infra_error", None): 1,
    }
    assert api.containers(all=True) == [], "the next start there removes what a lost one left"
    api.close()
