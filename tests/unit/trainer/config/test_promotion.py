"""[promotion]: what is refused, by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.trainer.step_samples import trainer_settings


@pytest.mark.parametrize(
    ("promotion", "checkpoint", "words"),
    [
        ({"gate": "magic"}, {}, "promotion.gate"),
        (
            {"gate": "canary"},
            {},
            r"no second adapter \(no adapters are trained",
        ),
        ({"gate": "held_out", "canary_share": 0.2}, {}, "canary_share: there is no canary"),
        ({"gate": "canary", "canary_share": 1.0}, {}, "canary_share"),
        ({"tasks": "t.jsonl"}, {}, "tasks: nobody waits for their rollouts: set "),
        ({"gate": "held_out", "command": ["a"]}, {}, "command: there are no tasks"),
        ({"gate": "held_out", "agent": "codex"}, {}, "agent: there are no tasks"),
        ({"keep": -1}, {}, "promotion.keep"),
        ({"alpha": 1.0}, {}, "promotion.alpha"),
        ({"reward_low": 2.0}, {}, "reward_low is 2, which is not below reward_high"),
        ({"gate": "held_out", "tags": {}}, {}, "every rollout would be held out"),
        ({"gate": "held_out"}, {"every_steps": 2}, "set checkpoint.every_steps = 1"),
        ({"gate": "held_out"}, {"every_s": 60}, "leave out checkpoint.every_s"),
    ],
)
def test_what_does_not_go_together_is_refused(
    promotion: dict[str, Any], checkpoint: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words.replace("promotion.", "")):
        trainer_settings(tmp_path, promotion=promotion, checkpoint=checkpoint)


def test_rollouts_are_held_out_with_the_gate_alone(tmp_path: Path) -> None:
    assert trainer_settings(tmp_path).promotion.held_out is None
    gated = trainer_settings(tmp_path, promotion={"gate": "held_out"})
    assert gated.promotion.held_out == {"split": "held_out"}


def test_a_canary_needs_two_engines_and_holds_nothing_out(tmp_path: Path) -> None:
    push = {"engines": ["http://127.0.0.1:8101"]}
    tried = trainer_settings(tmp_path, promotion={"gate": "canary"}, push=push)
    assert tried.promotion.held_out is None
    assert tried.promotion.canary_share == 0.1
    with pytest.raises(ValueError, match=r"'keep': with promotion.gate = 'canary'"):
        trainer_settings(tmp_path, promotion={"gate": "canary"}, push={**push, "kv_cache": "keep"})
