"""Sandboxes behind the first turns of a demonstration: replayed, kept, and compared."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tracegrad
from support.proxy.proxy_with_engine import ProxyWithEngine
from support.runner.anchored_agent import AnchoredAgent, call
from support.runner.runner_proxy import runner_proxy
from tracegrad.runner.anchored_sandboxes import AnchoredSandboxes, prefix_turns
from tracegrad.runner.local_sandbox import LocalSandbox, LocalSandboxes
from tracegrad.runner.sandbox import (
    BrokenEnvironment,
    Sandbox,
    SandboxSpec,
    SandboxUnavailable,
    Snapshot,
)
from tracegrad.store.anchors.schedule import AnchorSettings
from tracegrad.transport import ProxyRefused


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyWithEngine]:
    """From the demonstration's last turn back to its first, one with each success."""
    with runner_proxy(tmp_path, monkeypatch, anchors=AnchorSettings(window=1, group_size=1)) as it:
        yield it


class KeptFolder:
    """A sandbox with snapshots: copies of its folder."""

    def __init__(self, own: LocalSandbox, backend: KeptFolders) -> None:
        self._own, self._backend = own, backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    async def snapshot(self) -> Snapshot:
        kept = self._backend.folder / str(len(self._backend.kept))
        shutil.copytree(self._own.folder, kept)
        self._backend.kept.append(kept)

        async def remove() -> None:
            shutil.rmtree(kept)

        return Snapshot(SandboxSpec(workspace=kept), remove)


class KeptFolders:
    def __init__(self, folder: Path, kind: type[KeptFolder] = KeptFolder) -> None:
        self.folder, self._kind = folder, kind
        self.kept: list[Path] = []
        self._local = LocalSandboxes()

    async def start(self, spec: SandboxSpec) -> Sandbox:
        found: Any = self._kind(await self._local.start(spec), self)
        return found

    async def close(self) -> None:
        await self._local.close()


async def roll(
    sandboxes: AnchoredSandboxes, agent: AnchoredAgent, *, reward: float = 0.0
) -> tuple[int, str]:
    """The task's next rollout: its anchor, and its id."""
    async with sandboxes.rollout("fix", SandboxSpec(), tags={"split": "train"}) as one:
        await agent.solve(one, "fix it")
        one.rollout.reward(reward)
    await asyncio.to_thread(tracegrad.flush)
    return one.anchor, one.rollout.id


async def demonstrate(
    proxy: ProxyWithEngine, sandboxes: AnchoredSandboxes, agent: AnchoredAgent
) -> None:
    """Three turns: two commands, and an end."""
    proxy.engine.replies += [call("echo 1 >> log"), call("echo 2 >> log; cat log")]
    anchor, _ = await roll(sandboxes, agent, reward=1.0)
    assert (anchor, len(agent.ran)) == (0, 2)
    agent.ran.clear()


async def test_an_anchor_that_is_rolled_again_starts_from_the_state_at_its_turn(
    proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    agent, backend = AnchoredAgent(), KeptFolders(tmp_path)
    sandboxes = AnchoredSandboxes(backend, agent.act)
    await demonstrate(proxy, sandboxes, agent)
    assert (await roll(sandboxes, agent))[0] == 2
    assert agent.ran == ["echo 1 >> log", "echo 2 >> log; cat log"], "replayed once"
    agent.ran.clear()
    proxy.engine.replies.append(call("cat log; echo mine >> log"))
    anchor, rollout_id = await roll(sandboxes, agent)
    assert (anchor, agent.ran) == (2, ["cat log; echo mine >> log"])
    seen = proxy.engine.requests[-1]["messages"][-1]
    assert (seen["role"], seen["content"]) == ("tool", "0 1\n2\n")
    await roll(sandboxes, agent, reward=1.0)  # moves it one turn back
    agent.ran.clear()
    assert (await roll(sandboxes, agent))[0] == 1
    assert agent.ran == ["echo 1 >> log"]
    assert (await roll(sandboxes, agent))[0] == 1
    assert agent.ran == ["echo 1 >> log"]
    assert len(backend.kept) == 2
    row = proxy.store.rollout(rollout_id).summary
    assert (row.task_id, row.outcome, row.tags["split"]) == ("fix@2", "completed", "train")
    # Two of the demonstration's, the one that was not taken, and its own two behind the first two.
    turns = proxy.turns_of(rollout_id)
    assert [turn.sampling.get("source") for turn in turns] == ["demonstration"] * 3 + [None] * 2
    assert turns[3].parent_id == turns[1].turn_id
    await backend.close()


async def test_a_group_waits_for_the_one_that_replays(
    proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    agent, backend = AnchoredAgent(), KeptFolders(tmp_path)
    sandboxes = AnchoredSandboxes(backend, agent.act)
    await demonstrate(proxy, sandboxes, agent)
    made = await asyncio.gather(*(roll(sandboxes, agent) for _ in range(4)))
    assert [anchor for anchor, _ in made] == [2] * 4
    assert len(agent.ran) == 2
    await backend.close()


async def test_what_cannot_be_kept_is_replayed(proxy: ProxyWithEngine, tmp_path: Path) -> None:
    class HasVolumes(KeptFolder):
        async def snapshot(self) -> Snapshot:
            raise BrokenEnvironment("its volumes are in no snapshot")

    agent, backend = AnchoredAgent(), KeptFolders(tmp_path, HasVolumes)
    sandboxes = AnchoredSandboxes(backend, agent.act)
    await demonstrate(proxy, sandboxes, agent)
    for _ in range(2):
        assert (await roll(sandboxes, agent))[0] == 2
    assert agent.ran == ["echo 1 >> log", "echo 2 >> log; cat log"] * 2
    await backend.close()


async def test_without_snapshots_each_replays_and_only_so_many_are_kept(
    proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    agent, local = AnchoredAgent(), LocalSandboxes()
    sandboxes = AnchoredSandboxes(local, agent.act)
    await demonstrate(proxy, sandboxes, agent)
    for _ in range(2):
        assert (await roll(sandboxes, agent))[0] == 2
    assert agent.ran == ["echo 1 >> log", "echo 2 >> log; cat log"] * 2
    await local.close()
    agent.ran.clear()
    backend = KeptFolders(tmp_path)
    sandboxes = AnchoredSandboxes(backend, agent.act, most_snapshots=1)
    await roll(sandboxes, agent, reward=1.0)
    assert [kept.exists() for kept in backend.kept] == [True]
    await roll(sandboxes, agent)
    # One turn back, which the later state is of no use for.
    assert [kept.exists() for kept in backend.kept] == [False, True]
    await backend.close()


async def test_another_state_than_the_demonstrations_is_the_environments_doing(
    proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    agent, backend = AnchoredAgent(), KeptFolders(tmp_path)
    sandboxes = AnchoredSandboxes(backend, agent.act)
    proxy.engine.replies += [call("cat /proc/sys/kernel/random/uuid")]
    await roll(sandboxes, agent, reward=1.0)
    with pytest.raises(BrokenEnvironment, match="the replay differs from the demonstration"):
        await roll(sandboxes, agent)
    assert backend.kept == []

    async def lost(sandbox: Sandbox, reply: Any) -> Any:
        raise SandboxUnavailable("its engine is away")

    with pytest.raises(SandboxUnavailable):
        await roll(AnchoredSandboxes(backend, lost), agent)

    async def fails(sandbox: Sandbox, reply: Any) -> Any:
        raise KeyError("tool_calls")

    with pytest.raises(BrokenEnvironment, match="the replay failed: KeyError"):
        await roll(AnchoredSandboxes(backend, fails), agent)
    await asyncio.to_thread(tracegrad.flush)
    rows = proxy.store.rollouts(limit=None)
    assert sorted((str(row.outcome), row.reward) for row in rows) == [
        ("completed", 1.0),
        ("env_error", None),
        ("env_error", None),
        ("infra_error", None),
    ]
    await backend.close()


async def test_it_stands_in_no_other_rollout(proxy: ProxyWithEngine) -> None:
    agent, backend = AnchoredAgent(), LocalSandboxes()
    with tracegrad.rollout("outer"), pytest.raises(ValueError, match="stands in no other one"):
        await roll(AnchoredSandboxes(backend, agent.act), agent)
    await asyncio.to_thread(tracegrad.flush)
    assert [row.task_id for row in proxy.store.rollouts(limit=None)] == ["outer"]
    await backend.close()


async def test_a_proxy_without_anchors_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, backend = AnchoredAgent(), LocalSandboxes()
    refused = pytest.raises(ProxyRefused, match=r"\[proxy.anchors\]")
    with runner_proxy(tmp_path, monkeypatch), refused:
        await roll(AnchoredSandboxes(backend, agent.act), agent)
    await backend.close()


USER, FIRST, TOOL, SECOND, MORE = (
    {"role": role, "content": str(n)}
    for n, role in enumerate(("user", "assistant", "tool", "assistant", "user"))
)


def test_a_prefix_is_the_last_replies_with_what_stands_behind_them() -> None:
    request = {"messages": [FIRST, USER, FIRST, TOOL, SECOND, MORE, USER]}
    assert prefix_turns(request, 2) == [(FIRST, [TOOL]), (SECOND, [MORE, USER])]
    assert prefix_turns(request, 1) == [(SECOND, [MORE, USER])]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (None, "no messages"),
        ({"input": []}, "no messages"),
        ({"messages": [USER]}, "has 0 replies"),
    ],
)
def test_what_is_no_one_conversation_is_not_replayed(request_: Any, said: str) -> None:
    with pytest.raises(BrokenEnvironment, match=said):
        prefix_turns(request_, 1)
