"""docs/rewards.md, tried as it is written."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from support.store.events import make_turn, rollout_events
from support.trainer.judge_server import judge_server
from tracegrad.store import Store
from tracegrad_trainer.rewards.config import RewardSettings
from tracegrad_trainer.rewards.scoring import ScoringRun, ScoringScope, ScoringTotals

PAGE = Path(__file__).parents[4] / "docs" / "rewards.md"


def block(language: str) -> str:
    """The first of this language."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.databases("sqlite")
def test_the_example_gives_the_sum_of_its_parts(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    (tmp_path / "rules.py").write_text(block("python"))
    (tmp_path / "check.py").write_text(
        "import json, sys\nsys.exit(not json.load(sys.stdin)['turns'])\n"
    )
    (tmp_path / "grade.sh").write_text("#!/bin/sh\necho quality:\necho 0.5\n")
    (tmp_path / "grade.sh").chmod(0o755)
    for name, text in (("a", "I say 2: resolved."), ("b", "I say 8: no idea.")):
        reply: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": text}}]}
        store.append(rollout_events(name, task="t", reward=None, turns=0))
        store.append([make_turn(f"{name}.t", name, response=reply, sampled=range(1000))])
    given: dict[str, Any] = tomllib.loads(block("toml"))["rewards"]

    async def score() -> ScoringTotals:
        scope = ScoringScope(group_size=2)
        async with ScoringRun(store, RewardSettings.model_validate(given), scope) as run:
            return await run.finish()

    with judge_server() as server:
        given["judge"]["url"] = server.url
        asyncio.run(score())
    # resolved + .5 tests + .2 quality + .5 judge - .1 length, which is 200 of 800 tokens over
    assert store.rollout("a").summary.reward == pytest.approx(1 + 0.5 + 0.1 + 0.1 - 0.025)
    assert store.rollout("b").summary.reward == pytest.approx(0 + 0.5 + 0.1 + 0.4 - 0.025)


def test_the_page_names_every_setting() -> None:
    page = PAGE.read_text()
    assert [name for name in RewardSettings.model_fields if name not in page] == []
