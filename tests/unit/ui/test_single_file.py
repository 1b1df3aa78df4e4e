"""A rollout as one file."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.cli.sample_rollouts import coding_agent
from support.ui.large_turns import large_turn
from tracegrad.cli.app import app
from tracegrad.store import Store
from tracegrad.ui import single_file
from tracegrad.ui.single_file import rollout_html

CODING = "0193c0de0001" + "0" * 20


def test_the_file_has_all_in_it_and_names_nothing_else(store: Store) -> None:
    store.append(coding_agent())
    page = rollout_html(store, CODING)
    for outside in ("src=", "<link", '<form method="post', "/ui/"):
        assert outside not in page, outside
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    allowed = set(re.findall(r"sha256-[A-Za-z0-9+/=]+", policy[1].replace("&#43;", "+")))
    parts = re.findall(r"<(?:style|script type=\"module\")>(.*?)</(?:style|script)>", page, re.S)
    assert len(parts) == 2
    for part in parts:
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"sha256-{digest}" in allowed
    assert page.count("data-tokens") >= 19
    assert "The test suite fails since yesterday" in page


def tokens_shown(page: str) -> list[int]:
    """How many tokens of each turn the file has, where it has any."""
    boxes = page.split('<div class="stream')[1:]
    return [box.partition("</div>")[0].count('<span class="t ') for box in boxes]


@pytest.mark.parametrize(
    ("room", "shown", "said"),
    [
        (100_000, [8_000, 3_000, 10], None),
        (8_010, [5_000, 3_000, 10], "with a part of the tokens of 1 turn"),
        (3_010, [3_000, 10], "without the tokens of 1 turn"),
    ],
)
def test_whole_turns_have_their_tokens_and_a_large_one_takes_no_small_ones_room(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
    shown: list[int],
    said: str | None,
) -> None:
    monkeypatch.setattr(single_file, "MOST_TOKENS", room)
    store.append([large_turn(n, sampled=count) for n, count in enumerate((8_000, 3_000, 10))])
    page = rollout_html(store, "large")
    assert tokens_shown(page) == shown
    assert said is None or said in page
    assert ("The first 5,000 of 8,000 tokens." in page) == (room == 8_010)


def test_the_command_writes_it(store: Store, tmp_path: Path) -> None:
    store.append(coding_agent())
    url = f"sqlite:///{tmp_path}/store.db"
    command = ["rollouts", "export", CODING[:14], "--store", url]
    made = CliRunner().invoke(app, [*command, "--html", "-o", str(tmp_path / "one.html")])
    assert made.exit_code == 0, made.output
    assert (tmp_path / "one.html").read_text().startswith("<!doctype html>")
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    assert "--html" in refused.output
