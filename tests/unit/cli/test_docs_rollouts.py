"""The commands of docs/rollouts.md print what stands there."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli.run_rollouts import printed
from support.cli.sample_rollouts import trained_samples
from support.cli.timed_rollouts import timed_samples
from support.cli.tried_rollouts import tried_samples
from tracegrad.store import Store

PAGE = Path(__file__).resolve().parents[3] / "docs" / "rollouts.md"
_AGE = re.compile(r" +\d+[smhd] ")


def shown_on_the_page() -> Iterator[tuple[str, list[str]]]:
    """Each command, and the lines under it."""
    for block in re.findall(r"^```console\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ tracegrad rollouts ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.rstrip("\n").split("\n")
            yield command, lines


COMMANDS = list(shown_on_the_page())


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def test_every_command_is_shown() -> None:
    assert {command.split()[0] for command, _ in COMMANDS} == {
        *("ls", "show", "tree", "explain", "time", "pass")
    }


@pytest.mark.usefixtures("utc")
def test_it_prints_what_stands_there(sqlite_url: str, tmp_path: Path) -> None:
    timed_url = f"sqlite:///{tmp_path}/timed.db"
    tried_url = f"sqlite:///{tmp_path}/tried.db"
    with Store.open(sqlite_url) as store, Store.open(timed_url) as timed:
        trained_samples(store)
        timed_samples(timed)
    with Store.open(tried_url) as tried:
        tried_samples(tried)
    urls = {"time": timed_url, "pass": tried_url}
    for command, lines in COMMANDS:
        url = urls.get(command.split()[0], sqlite_url)
        text = printed(url, *command.split())
        found = [_AGE.sub(" AGE ", line) for line in text.split("\n")]
        at = 0
        for line in lines:
            if line == "…":  # some are left out
                continue
            expected = _AGE.sub(" AGE ", line)
            assert expected in found[at:], f"`{command}` does not print {line!r}"
            at += found[at:].index(expected) + 1
