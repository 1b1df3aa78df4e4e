"""IPA by anchors on vaults that sampling never opens; the whole table is `python -m ipa.demo`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ipa.run import Plan, Run, settings_of
from ipa.warm_start import warm_start

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_start(tmp_path_factory.mktemp("warm") / "model", seed=0)


def learn(warm: Path, folder: Path, **plan: Any) -> tuple[float, float, int, float]:
    """Success before and after, optimizer steps, and where the anchors stand."""
    settings = Plan(folder=folder, **plan)
    with ExitStack() as stack:
        curve = Run(settings, settings_of(settings, warm), stack).all()
    return curve.first, curve.last, curve.steps, curve.points[-1].anchor


# One vault of three turns: what anchors are for shows in a few seconds.
SMALL = {"vaults": 1, "turns": 3, "rounds": 45, "rollouts": 32, "exam": 64, "exam_every": 45}


@pytest.mark.parametrize("method", ["rollback", "parallel"])
def test_a_vault_is_learnt_from_an_experts_prefixes(
    warm: Path, tmp_path: Path, method: str
) -> None:
    before, after, steps, _ = learn(warm, tmp_path, method=method, **SMALL)
    assert before < 0.1
    assert after > 0.5
    assert steps > 5


def test_without_a_learning_rate_the_anchor_does_not_move(warm: Path, tmp_path: Path) -> None:
    plan = SMALL | {"rounds": 20, "exam_every": 20}  # each round is like the first
    before, after, steps, anchor = learn(warm, tmp_path, method="rollback", lr=0.0, **plan)
    assert max(before, after) < 0.1
    assert steps > 5
    assert anchor == 2.0


def test_shuffled_rewards_teach_nothing(warm: Path, tmp_path: Path) -> None:
    _, after, _, _ = learn(warm, tmp_path, method="rollback", shuffled=True, **SMALL)
    assert after < 0.2


def test_where_everything_fails_the_expert_is_imitated(warm: Path, tmp_path: Path) -> None:
    plan = SMALL | {"rounds": 12, "rollouts": 16, "exam_every": 12, "failing": True}
    given = {"method": "rollback", "objective": [["imitation", 0.1]]}
    before, after, steps, anchor = learn(warm, tmp_path, **(plan | given))
    assert before < 0.1
    assert after > 0.4, "the turn at the anchor, which the policy fails at, is imitated too"
    assert steps == 12
    assert anchor == 2.0, "nothing is mastered"


@pytest.mark.slow
def test_the_whole_demonstration_shows_what_it_says(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT / "examples")}
    command = [sys.executable, "-m", "ipa.demo"]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["success"]["ipa, rollback"]) == 3
