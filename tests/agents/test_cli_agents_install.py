"""What the shipped recipes install: pinned by hash, and refused where a hash is another."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from support.cli_agents.recipes import AGENTS, CACHE
from tracegrad.runner.agent_install import NODE, InstallFailed, install_agent
from tracegrad.runner.recipe import Recipe

pytestmark = pytest.mark.agents


@pytest.mark.parametrize(
    "recipe", [NODE, *(agent.recipe for agent in AGENTS.values())], ids=lambda recipe: recipe.name
)
def test_all_of_an_agent_is_pinned_by_its_hash(recipe: Recipe) -> None:
    assert recipe.lock is not None
    if recipe.installer == "pip":
        lines = recipe.lock.read_text().replace("\\\n", " ").splitlines()
        assert any(line.split()[0] == recipe.packages[0] for line in lines)
        assert all("==" in line and "--hash=sha256:" in line for line in lines)
        return
    lock = json.loads((recipe.lock / "package-lock.json").read_text())["packages"]
    [(package, version)] = lock.pop("")["dependencies"].items()
    assert recipe.packages == (f"{package}@{version}",)
    assert lock[f"node_modules/{package}"]["version"] == version == recipe.version
    assert all(each["integrity"].startswith("sha512-") for each in lock.values())


def test_an_npm_package_of_another_hash_is_refused(tmp_path: Path) -> None:
    codex = AGENTS["codex"].recipe
    assert codex.lock is not None
    lock = tmp_path / "lock"
    shutil.copytree(codex.lock, lock)
    text = (lock / "package-lock.json").read_text()
    text = re.sub(r"sha512-[^\"]{20}", "sha512-" + "A" * 20, text)
    (lock / "package-lock.json").write_text(text)
    with pytest.raises(InstallFailed, match=r"npm's registry.* All that was said: (.*)") as failure:
        install_agent(replace(codex, lock=lock), CACHE)  # whose Node is the real one
    log = Path(str(failure.value).rpartition(": ")[2])
    assert "EINTEGRITY" in log.read_text()
    assert not [*CACHE.glob(f"{log.stem}*folder*")]
