"""A rollout as one file."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from typer.testing import CliRunner

from support.cli.sample_rollouts import coding_agent
from tracegrad.cli.app import app
from tracegrad.store import Store
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
