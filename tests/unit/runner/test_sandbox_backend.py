"""Which backend makes a task's sandbox, and what the options of a run add to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tracegrad.runner import sandbox_backend as module
from tracegrad.runner.docker_backend import DockerSandboxes
from tracegrad.runner.local_sandbox import LocalSandboxes
from tracegrad.runner.sandbox import SandboxSpec
from tracegrad.runner.sandbox_backend import (
    ContainerOptions,
    container_backend,
    filled,
    sandbox_backend,
)
from tracegrad.runner.warm_pool import WarmPool

IMAGE = SandboxSpec(image="a")


@pytest.mark.parametrize(
    ("own", "asked", "found"),
    [
        ({}, {"image": "b", "cpus": 2}, {"image": "b", "cpus": 2}),
        ({"image": "a"}, {"image": "b", "cpus": 2}, {"image": "a", "cpus": 2}),
        ({"build": Path("a")}, {"image": "b"}, {"build": Path("a")}),
        ({"image": "a", "cpus": 1}, {"cpus": 2, "pids": 5}, {"image": "a", "cpus": 1, "pids": 5}),
        ({}, {"memory_mb": 64}, {"memory_mb": 64}),
    ],
)
def test_what_a_task_says_itself_stays(
    own: dict[str, Any], asked: dict[str, Any], found: dict[str, Any]
) -> None:
    assert filled(SandboxSpec(**own), SandboxSpec(**asked)) == SandboxSpec(**found)


@pytest.mark.parametrize("only", [{"cpus": 1}, {"user": "1:1"}, {"read_only": True}])
def test_what_only_a_container_has_needs_an_image(only: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs an image"):
        filled(SandboxSpec(), replace(SandboxSpec(), **only))


async def test_tasks_without_an_image_stay_processes() -> None:
    assert isinstance(sandbox_backend([SandboxSpec()], proxy="http://x"), LocalSandboxes)
    mixed = sandbox_backend([SandboxSpec(), IMAGE], proxy="http://x")
    assert (await mixed.start(SandboxSpec())).shares_files
    await mixed.close()


async def test_a_pool_of_none_is_no_pool() -> None:
    cold = container_backend("http://x", ContainerOptions(warm=0))
    assert isinstance(cold, DockerSandboxes)
    assert isinstance(container_backend("http://x", ContainerOptions(warm=1)), WarmPool)


def test_without_the_package_the_fix_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tracegrad\[docker\]"):
        sandbox_backend([IMAGE], proxy="http://x")
    sandbox_backend([SandboxSpec()], proxy="http://x")
