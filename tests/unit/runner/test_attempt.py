"""What an attempt tells of its sandbox's start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import tracegrad
from support.proxy.proxy_with_engine import ProxyWithEngine
from tracegrad.runner.attempt import Attempt, AttemptObserver, AttemptSettings, run_attempt
from tracegrad.runner.sandbox import BrokenEnvironment, Sandbox, SandboxSpec, SandboxUnavailable
from tracegrad.runner.stage_limits import StageLimits, StageTimeouts
from tracegrad.runner.task import Task


class Starts:
    """Sandboxes of which none comes."""

    def __init__(self, error: Exception | None) -> None:
        """`error`: None: they start for ever."""
        self._error = error
        self.begun = asyncio.Event()

    async def start(self, spec: SandboxSpec) -> Sandbox:
        self.begun.set()
        if self._error is None:
            await asyncio.Event().wait()
        assert self._error is not None
        raise self._error

    async def close(self) -> None:
        pass


class Tried(AttemptObserver):
    def __init__(self) -> None:
        self.came: list[bool] = []

    def sandbox_tried(self, came: bool) -> None:
        self.came.append(came)


def attempt_of(
    backend: Starts,
    seen: Tried,
    start_s: float | None = None,
    spec: SandboxSpec = SandboxSpec(),  # noqa: B008 (it is frozen)
) -> asyncio.Task[Attempt]:
    settings = AttemptSettings(
        backend=backend,
        logs=Path("logs"),
        limits=StageLimits(1),
        timeouts=StageTimeouts(start_s=start_s),
    )
    task = Task(id="a", command=("true",), sandbox=spec)
    return asyncio.create_task(run_attempt(task, settings, seen))


@pytest.mark.parametrize(
    ("error", "came", "outcome"),
    [
        (SandboxUnavailable("no engine"), False, "infra_error"),
        (BrokenEnvironment("no such image"), True, "env_error"),
        (OSError("no space"), False, "infra_error"),
        (None, False, "infra_error"),
    ],
)
async def test_a_start_that_fails_is_told_with_whose_doing_it_was(
    proxy: ProxyWithEngine, error: Exception | None, came: bool, outcome: str
) -> None:
    seen = Tried()
    attempt = await attempt_of(Starts(error), seen, start_s=0.1)
    assert (attempt.outcome, seen.came) == (outcome, [came])


async def test_the_image_is_a_tag_by_which_a_broken_one_is_found(
    proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    """One that is built has the same name for all tasks of its folder, and another after an edit
    of it. A folder without a Dockerfile has none."""
    specs = [SandboxSpec(image="python:3.12"), SandboxSpec(build=tmp_path)]
    for text in ("FROM a", "FROM b"):
        folder = tmp_path / text
        folder.mkdir()
        (folder / "Dockerfile").write_text(text)
        specs += [SandboxSpec(build=folder), SandboxSpec(build=folder, cpus=1)]
    broken = Starts(BrokenEnvironment("it does not build"))
    made = [await attempt_of(broken, Tried(), spec=spec) for spec in specs]
    await asyncio.to_thread(tracegrad.flush)
    tags = {row.rollout_id: row.tags.get("image") for row in proxy.store.rollouts(limit=None)}
    named, none, *built = (tags[attempt.rollout_id] for attempt in made)
    assert (named, none) == ("python:3.12", None)
    assert [built[0], built[2]] == [built[1], built[3]]
    assert built[0] != built[2]
    assert all(str(name).startswith("tracegrad/build:") for name in built)


async def test_a_start_that_is_cut_says_nothing_of_the_machine(proxy: ProxyWithEngine) -> None:
    """Else a few groups that are filled early would pause all starts."""
    seen, backend = Tried(), Starts(None)
    running = attempt_of(backend, seen)
    await backend.begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert seen.came == []
