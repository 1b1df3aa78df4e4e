"""The installer of CLI agents, with packages that cost nothing."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.cli_agents import install
from support.cli_agents.install import PINS, InstallFailed, Npm, Pip, installed
from support.cli_agents.recipes import AGENTS

pytestmark = pytest.mark.agents


@dataclass
class Parcel:
    name: str = "parcel"
    version: str = "1.0"
    installs: list[Path] = field(default_factory=list)
    broken: bool = False

    def install(self, folder: Path) -> None:
        self.installs.append(folder)
        (folder / f"{len(self.installs)}").touch()
        time.sleep(0.05)
        if self.broken:
            raise InstallFailed("as the test wants it")

    def path(self, folder: Path) -> list[Path]:
        return [folder]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(install, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_it_is_installed_once_however_many_ask_for_it(cache: Path) -> None:
    parcel = Parcel()
    asking = [threading.Thread(target=installed, args=(parcel,)) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert installed(parcel) == cache / "parcel-1.0"
    assert parcel.installs == [cache / "parcel-1.0"]


def test_half_an_installation_is_begun_again(cache: Path) -> None:
    parcel = Parcel(broken=True)
    with pytest.raises(InstallFailed):
        installed(parcel)
    parcel.broken = False
    folder = installed(parcel)
    assert not (folder / "1").exists()
    assert (folder / "2").exists()


def test_a_new_version_takes_the_place_of_the_old_one(cache: Path) -> None:
    other = installed(Parcel(name="parcel-post"))
    old = installed(Parcel())
    new = installed(Parcel(version="1.1"))
    assert new.exists()
    assert other.exists()
    assert not old.exists()


def test_what_cannot_be_installed_is_told_in_one_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'looking'\necho 'ERROR: no network' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(InstallFailed) as failure:
        installed(Pip("ghost", "1.0", tmp_path / "pins.txt"))
    log = cache / "ghost-1.0" / "install.log"
    assert str(failure.value) == (
        "ghost-1.0 could not be installed, pip or venv failed: ERROR: no network. It comes from"
        f" its public registry (npm or PyPI), which must be within reach; see {log}"
    )
    assert log.read_text() == "looking\nERROR: no network\n"


def test_the_command_of_an_installed_package_is_found_first(cache: Path) -> None:
    assert install.search_path(Parcel()).split(":")[0] == str(cache / "parcel-1.0")
    assert sys.prefix not in install.search_path(Parcel())


@pytest.mark.parametrize("name", AGENTS)
def test_all_of_an_agent_is_pinned_by_its_hash(name: str) -> None:
    package = AGENTS[name].package
    if isinstance(package, Pip):
        lines = package.requirements.read_text().replace("\\\n", " ").splitlines()
        assert f"{name}=={package.version}" in package.requirements.read_text()
        assert all("==" in line and "--hash=sha256:" in line for line in lines)
        return
    lock = json.loads((PINS / name / "package-lock.json").read_text())["packages"]
    [pinned] = lock.pop("")["dependencies"].items()
    assert lock[f"node_modules/{pinned[0]}"]["version"] == pinned[1] == package.version
    assert all(each["integrity"].startswith("sha512-") for each in lock.values())


def test_an_npm_package_of_another_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = installed(install.NODE)  # the real one, of the real cache
    monkeypatch.setattr(install, "installed", lambda _: node)
    monkeypatch.setattr(install, "PINS", tmp_path / "pins")
    shutil.copytree(PINS / "codex", tmp_path / "pins" / "codex")
    lock = tmp_path / "pins" / "codex" / "package-lock.json"
    lock.write_text(re.sub(r"sha512-[^\"]{20}", "sha512-" + "A" * 20, lock.read_text()))
    folder = tmp_path / "codex-0"
    folder.mkdir()
    with pytest.raises(InstallFailed) as failure:
        Npm("codex", "0").install(folder)
    assert "EINTEGRITY" in (folder / "install.log").read_text()
    assert "npm failed" in str(failure.value)
