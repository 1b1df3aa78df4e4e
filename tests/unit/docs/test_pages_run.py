"""What the pages for readers who begin tell them to type works: each page from its first block to
its last, in one folder, which has a run of two steps and a proxy before a scripted engine.

A block is run unless it says why not: `<!-- not run: REASON -->` before it. TOML is read as
settings, unless `<!-- file: NAME -->` says which other file it is.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.docs.blocks import DOCS, Block, blocks_of
from support.engines.mock_engine import MockEngine
from support.proxy.proxy_with_engine import proxy_with_engine
from support.proxy.servers import EngineServer, serving
from support.trainer.prepared_run import save_smallest_model
from support.trainer.step_samples import trained as take_steps
from tracegrad.cli.app import app as tracegrad_app
from tracegrad_trainer.cli.app import app as trainer_app
from tracegrad_trainer.config.loading import load_settings

FOLDERS = ("howto", "coming-from")
PAGES = sorted(
    ["index.md", "start.md", "concepts.md"]
    + [f"{folder}/{page.name}" for folder in FOLDERS for page in (DOCS / folder).glob("*.md")]
)
SHELL, PYTHON, SETTINGS = "sh", "python", "toml"
SHOWN = ("text", "json")  # output, and what is sent: nothing to run
# What a page says, and what it is in the run of the test.
OWN = {"01a220c7c3fc": "t2r0", "812": "2"}
COMMANDS = {"tracegrad": tracegrad_app, "trainer": trainer_app}
PROXY = "http://127.0.0.1:4141"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, and with `.tracegrad` of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    save_smallest_model(folder / "model")
    take_steps(folder, 4, 2, state_dir=folder / ".tracegrad")
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it, with a proxy on its store at TRACEGRAD_URL."""
    here = tmp_path / "here"
    shutil.copytree(trained, here)
    server = EngineServer()
    with (
        serving(server, lifespan="off") as server.url,
        proxy_with_engine(server, MockEngine(), here / ".tracegrad" / "store.db") as proxy,
    ):
        monkeypatch.setenv("TRACEGRAD_URL", proxy.url)
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        monkeypatch.delenv("TRACEGRAD_API_KEY", raising=False)
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.chdir(here)
        yield here
        proxy.close_clients()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_works_as_it_is_written(page: str, folder: Path) -> None:
    for block in blocks_of(page):
        own = {PROXY: os.environ["TRACEGRAD_URL"], **OWN}
        _try(block, f"docs/{page}:{block.line}", folder, own)


def test_a_block_says_why_it_is_not_run_or_is_run() -> None:
    languages = {SHELL, PYTHON, SETTINGS, *SHOWN}
    for page in PAGES:
        for block in blocks_of(page):
            where = f"docs/{page}:{block.line}"
            assert block.language in languages, f"{where}: no test knows {block.language!r}"
            assert block.not_run is None or len(block.not_run.split()) > 3, f"{where}: why?"


def _try(block: Block, where: str, folder: Path, own: Mapping[str, str]) -> None:
    text = block.text
    for shown, instead in own.items():
        text = text.replace(shown, instead)
    if block.file is not None:
        (folder / block.file).write_text(text, encoding="utf-8")
    elif block.not_run is not None or block.language in SHOWN:
        return
    elif block.language == SETTINGS:
        (folder / "tracegrad.toml").write_text(text, encoding="utf-8")
        load_settings(folder / "tracegrad.toml", [f"model={folder / 'model'}"])
        (folder / "tracegrad.toml").unlink()  # the run of the test has settings of its own
    elif block.language == PYTHON:
        _run([sys.executable, "-c", text], where, folder)
    else:
        _type(text, where, folder)


def _type(text: str, where: str, folder: Path) -> None:
    """A block whose every line is a plain command of ours needs no new Python for each."""
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if "|" not in line]
    plain = len(lines) == len(text.splitlines()) and not re.search(
        r"[$&><]|^tracegrad run", text, re.M
    )
    if not plain or not all(words and words[0] in COMMANDS for words in lines):
        _run(["bash", "-euo", "pipefail", "-c", text], where, folder)
        return
    for words in lines:
        done = CliRunner().invoke(COMMANDS[words[0]], words[1:])
        assert done.exit_code == 0, f"{where}: {' '.join(words)}\n{done.output}\n{done.exception!r}"


def _run(command: list[str], where: str, folder: Path) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        text=True,
        timeout=250,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"{where} ended with {done.returncode}:\n{done.stdout[-3000:]}"
