"""Both commands as a shell has them: help, version, completion, and libraries that are missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import pytest
import typer.main

import tracegrad
import tracegrad_trainer
from tracegrad.cli.app import app as tracegrad_app
from tracegrad.cli.missing_dependency import is_ours_to_install
from tracegrad_trainer.cli.app import app as trainer_app

PYPROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
MODULES = {"tracegrad": "tracegrad", "trainer": "tracegrad_trainer"}

# An install that lacks libraries: they cannot be imported, here and in processes started from here.
WITHOUT_LIBRARIES = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{path} {name}")


EVERY = dict(
    [
        *commands(typer.main.get_command(tracegrad_app), "tracegrad"),
        *commands(typer.main.get_command(trainer_app), "trainer"),
    ]
)


def run(
    module: str, *words: str, without: tuple[str, ...] = (), folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(WITHOUT_LIBRARIES.format(names=without))
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        env={**os.environ, "COLUMNS": "80", "PYTHONPATH": str(folder), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("path", EVERY)
def test_help_has_every_word_of_the_command(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *words = path.split()
    with pytest.raises(SystemExit) as end:
        EVERY[name].main([*words, "--help"], prog_name=name, standalone_mode=True)
    assert end.value.code == 0
    said = capsys.readouterr().out
    wanted = EVERY[path].help or ""
    assert wanted.split(), "a command says what it does"
    assert " ".join(wanted.split()) in " ".join(said.split()), "[brackets] are no markup"
    summaries = said.partition("Commands:")[2]
    assert not re.search(r"\.\.\.$", summaries, re.MULTILINE), "summaries fit 80 columns"


@pytest.mark.parametrize("name", MODULES)
def test_the_version_is_that_of_the_distribution(name: str, tmp_path: Path) -> None:
    assert tracegrad.__version__ == tracegrad_trainer.__version__ == metadata.version("tracegrad")
    for without in ((), ("typer", "torch", "sqlalchemy")):
        done = run(MODULES[name], "--version", without=without, folder=tmp_path)
        assert done.stdout == f"tracegrad {tracegrad.__version__}\n"


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PYPROJECT["project"]["dynamic"]
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "sdk/tracegrad/version.py"
    # As semver.org has it, in the one form that PEP 440 has too.
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", tracegrad.__version__)


@pytest.mark.parametrize(
    ("name", "words", "found"),
    [("tracegrad", "tracegrad rollouts ", "explain"), ("trainer", "trainer s", "status")],
)
def test_a_shell_completes_commands(name: str, words: str, found: str, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(f"import sys; sys.argv[0] = {name!r}\n" + {
        "tracegrad": "from tracegrad.cli import main",
        "trainer": "from tracegrad_trainer.__main__ import main",
    }[name] + "\nmain()\n")  # fmt: skip
    environment = {
        f"_{name.upper()}_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": "2" if words.endswith(" ") else "1",
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found in done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize(
    ("name", "words", "without", "extra"),
    [
        ("tracegrad", "--help", "typer", "proxy"),
        ("trainer", "--help", "typer", "trainer"),
        ("trainer", "step", "jaxtyping", "trainer"),
        ("trainer", "export -o x", "torch", "trainer"),
    ],
)
def test_a_light_install_says_in_one_line_what_to_install(
    name: str, words: str, without: str, extra: str, tmp_path: Path
) -> None:
    done = run(MODULES[name], *words.split(), without=(without,), folder=tmp_path)
    line = f"{name}: {without} is not installed: pip install 'tracegrad[{extra}]'\n"
    assert (done.stderr, done.returncode) == (line, 1)


def test_help_needs_no_library_of_the_trainers(tmp_path: Path) -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    names = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in extras["trainer"]}
    proxys = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in extras["proxy"]}
    heavy = tuple(sorted(names - proxys - {"tracegrad"}))
    done = run("tracegrad_trainer", "serve", "--help", without=heavy, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--state-dir" in done.stdout


def test_a_missing_module_of_the_users_is_not_ours_to_install() -> None:
    assert is_ours_to_install("pydantic_settings")
    assert is_ours_to_install("opentelemetry.proto.trace.v1")
    assert not is_ours_to_install("my_agent.rewards")


def test_a_variable_that_nothing_reads_is_named_by_every_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACEGRAD_STOER", "sqlite:///x.db")
    for name, app, words in (
        ("tracegrad", tracegrad_app, ["rollouts", "ls", "--store", f"sqlite:///{tmp_path}/s.db"]),
        ("trainer", trainer_app, ["status", "--state-dir", str(tmp_path)]),
    ):
        with pytest.raises(SystemExit):
            app(words)
        said = "TRACEGRAD_STOER: nothing reads this variable; did you mean TRACEGRAD_STORE?"
        assert capsys.readouterr().err.splitlines()[0] == f"{name}: {said}"
