"""Live chat that nobody groups or rewards: its prompts are sampled again, scored, and trained."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import openai
import pytest

from support.agents.toy_agents import TOOL
from support.trainer.char_model import save_char_model
from support.trainer.trainer_serve import TrainerServe, cli_json, trainer_serve
from tracegrad.store import RolloutSummary, Store
from tracegrad_trainer.config.resample import RESAMPLE_OF, RESAMPLED
from tracegrad_trainer.launch.run_state import read_state

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = 6
# As good as a coin, of what the rollout says: groups of equal rewards would not be trained.
COIN = "test $(( $(wc -c) % 2 )) = 0"
SETTINGS: dict[str, object] = {
    "ranks": 1,
    "resample.prompts": "live",
    "data.tags": json.dumps({RESAMPLED: "true"}),
    "data.in_flight": 8,
    "rewards.commands": json.dumps({"coin": COIN}),
}


def rollouts(run: TrainerServe) -> list[RolloutSummary]:
    with Store.open(run.store_url, create=False) as store:
        return store.rollouts(limit=None)


def test_a_step_of_live_prompts(tmp_path: Path) -> None:
    settings = {"model": save_char_model(tmp_path / "model"), **SETTINGS}
    with trainer_serve(tmp_path / "state", settings) as run:
        run.wait_serving()
        with openai.OpenAI(base_url=f"{run.url}/v1", api_key="none") as client:
            for number in range(PROMPTS + 1):
                client.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": f"live {number}"}],
                    max_tokens=12,
                    temperature=0.3,
                    tools=[TOOL] if number == PROMPTS else openai.omit,  # type: ignore[list-item]
                )
        run.wait(lambda: run.last_step() >= 1)
        run.wait(lambda: (read_state(run.state_dir, "resampling") or {}).get("unusable"))
        status = cli_json("trainer", "status", f"--state-dir={run.state_dir}", "--json")
        run.signal(signal.SIGTERM)
        run.ended().is_clean()
    rows = rollouts(run)
    live = {row.rollout_id for row in rows if RESAMPLED not in row.tags}
    again = [row for row in rows if RESAMPLED in row.tags]
    assert len(live) == PROMPTS + 1
    assert {row.tags[RESAMPLE_OF] for row in again} <= live
    assert status["resampled"]["prompts"] >= 2
    assert status["resampled"]["unusable"] == {"tools": 1}
    assert status["turns_trained"] > 0
    assert not any(row.consumed_step for row in rows if row.rollout_id in live)
