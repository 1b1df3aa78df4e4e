"""`tracegrad.run(…, ray=…)`: an agent that is a function, called on the hosts of a cluster."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import tracegrad
from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.servers import eventually
from support.runner.ray_cluster import ray_cluster
from support.runner.runner_proxy import runner_proxy
from tracegrad.events import Outcome
from tracegrad.store import RolloutSummary

KEY = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Each of its two hosts has room for one agent. One of them may have been lost."""
    with ray_cluster(2) as found:
        yield found


def rows(proxy: ProxyWithEngine) -> list[RolloutSummary]:
    return list(proxy.store.rollouts(limit=None))


def ended(proxy: ProxyWithEngine, count: int) -> list[RolloutSummary]:
    def found() -> list[RolloutSummary] | None:
        them = rows(proxy)
        return them if len(them) == count and all(row.outcome for row in them) else None

    them: list[RolloutSummary] = eventually(found, 60)
    return them


def asks() -> Callable[[Any], str]:
    """Made here, so that hosts get it as it is, and import no tests."""

    def ask(rollout: Any) -> str:
        import json
        from urllib.request import Request, urlopen

        body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {rollout.api_key}"}
        url = f"{rollout.base_url}/chat/completions"
        with urlopen(Request(url, json.dumps(body).encode(), headers)) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])

    return ask


def test_a_host_lost_in_the_middle_costs_its_attempts_and_they_are_made_again(
    cluster: Any, proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    """The other agent goes on when that is noticed; what both return is scored here."""
    gate, ask = tmp_path / "gate", asks()
    here, scored_in = os.getpid(), set[int]()
    lost: list[BaseException] = []

    def solve(task: dict[str, str], rollout: tracegrad.Rollout) -> tuple[str, int]:
        import time

        said = ask(rollout)
        while not gate.exists():
            time.sleep(0.05)
        return said + task["id"], os.getpid()

    def reward(task: dict[str, str], answer: tuple[str, int]) -> float:
        scored_in.add(os.getpid())
        return 0.5 if answer[0] == "ok" + task["id"] and answer[1] != here else 0.0

    def lose_one() -> None:
        try:
            eventually(lambda: sum(row.turns for row in rows(proxy)) == 2, 120)
            cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
            eventually(lambda: any(row.outcome == "infra_error" for row in rows(proxy)), 120)
        except BaseException as error:
            lost.append(error)
        finally:
            gate.touch()

    loser = threading.Thread(target=lose_one)
    loser.start()
    report = tracegrad.run(
        solve, train=[{"id": "a"}, {"id": "b"}], reward=reward, concurrency=2, ray=cluster.address
    )
    loser.join()
    assert lost == []
    assert (report.groups, report.replaced) == (2, 1)
    them = ended(proxy, 3)
    assert Counter((str(row.outcome), row.reward) for row in them) == {
        ("completed", 0.5): 2,
        ("infra_error", None): 1,
    }
    [gone] = [row for row in them if row.outcome == "infra_error"]
    assert gone.error is not None
    assert "is lost" in gone.error
    assert scored_in == {here}


@pytest.fixture
def closed_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyWithEngine]:
    """It wants a key, of which hosts know only what they are sent."""
    with runner_proxy(tmp_path, monkeypatch, admin_key=KEY) as found:
        monkeypatch.setenv("TRACEGRAD_API_KEY", KEY)
        yield found


def test_what_is_said_of_a_rollout_there_is_said_of_it_here(
    cluster: Any, closed_proxy: ProxyWithEngine
) -> None:
    """Rewards, an end, what it opens inside, and its spans; how what it raised is told apart, also
    where the exception itself could not be sent."""
    proxy = closed_proxy
    ask = asks()

    async def solve(task: dict[str, str], rollout: tracegrad.Rollout) -> Any:
        @tracegrad.trace(name="tool")
        def tool() -> None:
            raise KeyError

        ask(rollout)
        if task["id"] == "rewards":
            tracegrad.reward(0.25)
            tracegrad.reward(0.75, turn=0, name="format")
            rollout.finish("budget")
        elif task["id"] == "inside":
            with tracegrad.rollout("inner"):
                tracegrad.reward(0.5)
            return 1
        elif task["id"] == "serving":

            class APIConnectionError(Exception):
                def __init__(self, *, said: str) -> None:  # pickle would call it without
                    super().__init__(said)

            raise APIConnectionError(said="away")
        elif task["id"] == "raises":
            with suppress(KeyError):
                tool()
            raise ValueError("no tool")
        elif task["id"] == "exits":
            raise SystemExit(3)
        elif task["id"] == "unsendable":
            return threading.Lock()
        return None

    names = ["rewards", "inside", "serving", "raises", "exits", "unsendable"]
    report = tracegrad.run(
        solve,
        train=[{"id": name} for name in names],
        retries=0,
        ray=cluster.address,
        tags={"split": "there"},
    )
    found = {row.task_id: row for row in ended(proxy, len(names) + 1)}
    assert {name: (row.outcome, row.reward) for name, row in found.items()} == {
        "rewards": ("budget", 0.25),
        "inside": ("completed", 1.0),
        "inner": ("completed", 0.5),
        "serving": ("infra_error", None),
        "raises": ("agent_error", 0.0),
        "exits": ("agent_error", 0.0),
        "unsendable": ("env_error", None),
    }
    assert report.outcomes[Outcome.AGENT_ERROR] == 2
    assert "no tool" in str(found["raises"].error)
    assert "return plain data" in str(found["unsendable"].error)
    of_turn = proxy.store.rewards(found["rewards"].rollout_id)
    assert {(one.name, one.turn, one.value) for one in of_turn} == {
        ("reward", None, 0.25),
        ("format", 0, 0.75),
    }
    of_agent, of_tool = proxy.store.spans(found["raises"].rollout_id)
    assert (of_agent.name, of_tool.name, of_tool.status) == ("solve", "tool", "error")
    assert of_tool.parent_span_id == of_agent.span_id


async def test_two_runs_of_a_process_share_the_cluster(
    cluster: Any, proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    """The one that joined it first is through first."""
    gate = tmp_path / "gate"

    def first(task: Any) -> float:
        return 1.0

    def second(task: Any) -> float:
        import time

        while not gate.exists():
            time.sleep(0.05)
        return 0.5

    async def run(agent: Callable[[Any], float]) -> tracegrad.RunReport:
        # So little that both have room, whichever is placed first.
        options: dict[str, Any] = {"ray": cluster.address, "ray_resources": {"CPU": 0.1}}
        return await tracegrad.run_async(agent, train=[{"id": "a"}], **options)

    shorter, longer = asyncio.create_task(run(first)), asyncio.create_task(run(second))
    assert (await shorter).groups == 1
    gate.touch()
    assert (await longer).replaced == 0


def test_an_agent_out_of_time_is_ended_with_its_process(
    cluster: Any, proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    pid, ask = tmp_path / "pid", asks()

    def solve(task: Any, rollout: tracegrad.Rollout) -> None:
        import time

        ask(rollout)
        tracegrad.reward(0.125)
        pid.write_text(str(os.getpid()))
        time.sleep(3600)

    # One that comes to no call in its time on a busy machine is made again.
    tracegrad.run(solve, train=[{"id": "slow"}], timeout_s=6, retries=9, ray=cluster.address)
    [row] = [row for row in ended(proxy, len(rows(proxy))) if row.outcome == "budget"]
    assert (row.error, row.reward) == ("timed out after 6 s", 0.125)
    eventually(lambda: not psutil.pid_exists(int(pid.read_text())), 60)


def test_what_cannot_be_called_there_is_said(cluster: Any, proxy: ProxyWithEngine) -> None:
    lock = threading.Lock()

    def holds_a_lock(task: Any) -> float:
        with lock:
            return 1.0

    class Unknown:
        """Of a module that hosts do not have."""

        def __reduce__(self) -> Any:
            return __import__, ("no_such_module_there",)

        def __call__(self, task: Any) -> float:
            return 1.0

    with pytest.raises(ValueError, match=r"ray: the agent cannot be sent.*lock.*inside of it"):
        tracegrad.run(holds_a_lock, train=[{"id": "a"}], ray=cluster.address)
    tracegrad.run(Unknown(), train=[{"id": "a"}], retries=0, ray=cluster.address)
    [row] = ended(proxy, 1)
    assert row.outcome == "env_error"
    assert "no_such_module_there" in str(row.error)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ray": "127.0.0.1:1"}, "^ray 127.0.0.1:1: nobody is there"),
        ({"ray_resources": {"CPU": 2}}, "^ray_resources: there is no ray"),
        ({"ray": "auto", "ray_resources": {"CPU": -1}}, "^ray_resources: CPU = -1 is not"),
    ],
)
def test_wrong_arguments_are_named(
    proxy: ProxyWithEngine, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        tracegrad.run(lambda task: 1.0, train=[1], **settings)
