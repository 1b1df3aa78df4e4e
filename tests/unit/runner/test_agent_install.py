"""Agents' programs in their cache: once, whole, and never for an attempt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.proxy.servers import eventually
from tracegrad.runner import agent_install
from tracegrad.runner.agent_install import (
    InstallFailed,
    agents_cache,
    found_agent,
    install_agent,
    why_failed,
)
from tracegrad.runner.recipe import Recipe

TOY = Recipe(
    name="toy",
    version="1.0",
    dialect="chat",
    installer="shell",
    shell=("printf x >> $LOG", "printf '#!/bin/sh\\necho toy' > bin/toy; chmod +x bin/toy"),
    command=("toy", "{prompt}"),
)
INSTALL = """
import json, sys
from pathlib import Path
from tracegrad.runner.agent_install import install_agent
from tracegrad.runner.recipe import Recipe
given = json.loads(sys.argv[1])
recipe = Recipe(**{**given, **{name: tuple(given[name]) for name in ("shell", "command")}})
print(install_agent(recipe, Path(sys.argv[2])).folder)
"""


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOG", str(tmp_path / "installs"))
    return tmp_path / "installs"


def installer(recipe: Recipe, cache: Path) -> subprocess.Popen[str]:
    names = ("name", "version", "dialect", "installer", "shell", "command")
    given = json.dumps({name: getattr(recipe, name) for name in names})
    command = [sys.executable, "-c", INSTALL, given, str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_it_is_installed_once_however_many_ask_for_it(tmp_path: Path, log: Path) -> None:
    asking = [installer(TOY, tmp_path / "cache") for _ in range(3)]
    folders = {one.communicate()[0].strip() for one in asking}
    assert len(folders) == 1
    assert log.read_text() == "x"
    [folder] = folders
    assert subprocess.check_output([f"{folder}/bin/toy"], text=True) == "toy\n"


def test_half_an_installation_is_begun_again(tmp_path: Path) -> None:
    cache, stuck = tmp_path / "cache", tmp_path / "stuck"
    toy = replace(TOY, shell=(f"touch half; test -e {stuck} || exec sleep 600", *TOY.shell))
    begun = installer(toy, cache)
    halves = eventually(lambda: [*cache.glob("toy@1.0-*/half")], 60)
    sleeping = eventually(
        lambda: [pid for pid in _children(begun.pid) if "sleep" in _name(pid)], 60
    )
    begun.kill()
    begun.communicate()
    os.kill(sleeping[0], signal.SIGKILL)
    assert found_agent(toy, cache) is None
    stuck.touch()
    folder = install_agent(toy, cache).folder
    assert (folder / "half").exists()
    assert not halves[0].exists()
    assert {path.resolve() for path in cache.iterdir() if path.is_dir()} == {folder}


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def test_what_cannot_be_installed_is_told_in_one_line(tmp_path: Path) -> None:
    toy = replace(TOY, shell=("echo looking; echo 'ERROR: no network' >&2; exit 3",))
    with pytest.raises(InstallFailed) as failure:
        install_agent(toy, tmp_path / "cache")
    [log] = (tmp_path / "cache").glob("*.log")
    assert str(failure.value) == (
        f"toy@1.0 could not be installed: ERROR: no network. All that was said: {log}"
    )
    assert log.read_text() == "looking\nERROR: no network\n"
    assert found_agent(toy, tmp_path / "cache") is None
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_an_edited_recipe_is_another_folder_and_the_old_one_stays(tmp_path: Path) -> None:
    old = install_agent(TOY, tmp_path / "cache")
    edited = replace(TOY, shell=(*TOY.shell, "touch more"))
    assert found_agent(edited, tmp_path / "cache") is None
    new = install_agent(edited, tmp_path / "cache")
    assert (new.folder / "more").exists()
    assert found_agent(TOY, tmp_path / "cache") == old
    assert found_agent(edited, tmp_path / "cache") == new


def test_a_command_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_install, "TIMEOUT_S", 0.2)
    with pytest.raises(InstallFailed, match=r"not done in 0 s"):
        install_agent(replace(TOY, shell=("exec sleep 600",)), tmp_path / "cache")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("working\nERROR: no such version\n\n", "ERROR: no such version"),
        (
            "npm error code ETARGET\nnpm error notarget No matching version found for a@9.\n"
            "npm error A complete log of this run can be found in: /tmp/x.log\n",
            "npm: code ETARGET notarget No matching version found for a@9. A complete log of this"
            " run can be found in: /tmp/x.log",
        ),
        ("", ""),
    ],
)
def test_what_an_installer_says_of_its_failure(said: str, why: str) -> None:
    assert why_failed(said) == why


def test_a_full_or_forbidden_cache_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(InstallFailed, match=r"toy@1\.0 could not be installed: .*XDG_CACHE_HOME"):
        install_agent(TOY, tmp_path / "cache")


def test_nothing_is_installed_where_nothing_is_asked(tmp_path: Path) -> None:
    assert install_agent(replace(TOY, installer="none"), tmp_path / "cache").search_path == ()
    with pytest.raises(InstallFailed, match=r"apt-get install tmux"):
        install_agent(replace(TOY, installer="apt", packages=("tmux",)), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert agents_cache() == tmp_path / "tracegrad" / "agents"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert agents_cache() == Path.home() / ".cache" / "tracegrad" / "agents"
