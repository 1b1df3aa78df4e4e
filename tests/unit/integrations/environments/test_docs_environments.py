"""The programs of docs/environments.md run, and print what stands there."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from support.engines.mock_engine import Answer
from support.proxy.proxy_with_engine import ProxyWithEngine

PAGE = Path(__file__).resolve().parents[4] / "docs" / "environments.md"


def programs() -> list[tuple[str, str]]:
    """Each, with the block of what it prints."""
    text = PAGE.read_text()
    found = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.M | re.S)
    assert found
    return found


def test_an_environment_is_driven(
    proxy: ProxyWithEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three steps down from the start there is a hole."""
    proxy.engine.replies = deque(Answer("1") for _ in range(24))
    [source] = [source for source, _ in programs() if "episode_agent" in source]
    variables: dict[str, Any] = {}
    exec(source, variables)
    assert variables["report"].outcomes == {"completed": 8}
    assert not proxy.engine.replies


def test_an_agent_is_stepped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRACEGRAD_API_KEY", raising=False)
    [(source, printed)] = [each for each in programs() if "AgentEnv" in each[0]]
    exec(source, {})
    assert capsys.readouterr().out == printed
    assert (tmp_path / ".tracegrad" / "environments.db").exists()
