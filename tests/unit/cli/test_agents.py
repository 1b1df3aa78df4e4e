"""`tracegrad agents`: recipes that are ours, and a user's own."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tracegrad.cli.app import app

TOY = """
name = "toy"
version = "1.0"
about = "says hello"
dialect = "chat"
installer = "shell"
shell = [{shell}]
command = ["toy", "{{prompt}}"]

[[traps]]
what = "It sulks."
remedy = "Praise it."
"""
OURS = {"claude-code", "codex", "gemini-cli", "mini-swe-agent", "opencode", "qwen-code"}


@pytest.fixture(autouse=True)
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ".tracegrad" / "recipes"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(folder / "toy.toml", "printf hello > bin/toy")
    return folder


def write(path: Path, line: str) -> None:
    path.write_text(TOY.format(shell=json.dumps(line)))


def agents(*arguments: str, columns: int = 120) -> Result:
    environment = {"TERM": "dumb", "COLUMNS": str(columns)}
    return CliRunner().invoke(app, ["agents", *arguments], env=environment)


def of_name(name: str) -> dict[str, Any]:
    result = agents("--json")
    assert result.exit_code == 0, result.output
    return next(one for one in json.loads(result.stdout) if one["name"] == name)


def test_all_that_can_be_run_and_where_a_recipe_is_a_users_own() -> None:
    result = agents()
    assert result.exit_code == 0, result.output
    for name in OURS | {"toy"}:
        assert name in result.stdout
    [own] = [line for line in result.stdout.splitlines() if ".tracegrad/recipes/toy.toml" in line]
    assert own.split()[:3] == ["toy", "1.0", "chat"]


def test_one_with_its_traps_and_their_remedies() -> None:
    shown = agents("show", "toy").stdout
    assert "It sulks." in shown
    assert "Praise it." in shown
    ours = json.loads(agents("show", "codex", "--json").stdout)
    assert ours["traps"]
    assert all(trap["remedy"] for trap in ours["traps"])


def test_installed_once_it_is_said_to_be(tmp_path: Path) -> None:
    assert of_name("toy")["installed"] is False
    done = agents("install", "toy")
    assert done.exit_code == 0, done.output
    assert "toy@1.0 is installed" in done.stdout
    [program] = (tmp_path / "cache").rglob("bin/toy")
    assert program.read_text() == "hello"
    assert of_name("toy")["installed"] is True


def test_an_installation_that_fails_says_so(recipes: Path) -> None:
    write(recipes / "toy.toml", f"echo {shlex.quote('no luck')}; exit 1")
    done = agents("install", "toy")
    assert done.exit_code == 1
    assert "no luck" in done.output
    assert of_name("toy")["installed"] is False


def test_one_that_cannot_be_read_does_not_hide_the_others(recipes: Path) -> None:
    (recipes / "bad.toml").write_text('name = "bad"')
    result = agents()
    assert result.exit_code == 1
    assert "toy" in result.stdout
    assert "bad.toml" in result.stderr


@pytest.mark.parametrize(
    ("name", "said"), [("codxe", "did you mean codex?"), ("toy@1 0", "is no version")]
)
def test_a_name_that_nobody_knows(name: str, said: str) -> None:
    result = agents("show", name)
    assert result.exit_code == 2
    assert said in result.output
