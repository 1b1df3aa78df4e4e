"""The process that pushes, killed with SIGKILL between one thing and the next, beside a real vLLM
and a proxy that live on: after a restart the served version, the ledger and the weights agree,
and no turn is trained twice or lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.engines.vllm_server import tiny_settings
from support.trainer.kill_runs import Runs, fates, made, same, state_of
from support.trainer.killed_process import PUSH_POINTS
from support.trainer.prepared_run import fill, steps_of
from support.trainer.pushing_ranks import GAP, Agents, PushingRanks, pushing_ranks
from support.trainer.tiny_model import reference_logprobs, save_tiny_model
from tracegrad.events import Turn
from tracegrad.store import Store
from tracegrad_trainer.engine.checkpoint.manifest import checkpoint_step, list_checkpoints
from tracegrad_trainer.inference.logprob_probe import compare_logprobs
from tracegrad_trainer.inference.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
STEPS = 3
# Step 2 is pushed the third time: the model folder's weights were the first.
OF_STEP_2 = dict.fromkeys(PUSH_POINTS, 3) | {
    "while it is written": 2,
    "whole, not committed": 2,
    "before the commit": 2,
    "after the commit": 2,
}
TELLING = ["nothing sent", "weights half ready", "pushed, not recorded", "before the commit"]
LINGER_S = 0.5  # in which a checkpoint of this size is whole on a machine that is not busy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    settings = tiny_settings(model, tmp_path_factory.mktemp("vllm") / "vllm.log")
    small = settings.model_copy(update={"max_model_len": 256})
    with VllmProcess(small) as process:
        process.wait_healthy(timeout=240)
        yield process


@pytest.fixture(scope="module")
def unkilled(
    runs: Runs, engine: VllmProcess, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What is left of a run that nobody killed."""
    state_dir = tmp_path_factory.mktemp("unkilled") / "state"
    with pushing_ranks(runs, engine, model, state_dir) as pushing:
        fill(pushing.store_url, groups=10)
        assert pushing.run(until=STEPS)
        pushing.agree()
        return left(pushing)


def left(pushing: PushingRanks) -> dict[str, Any]:
    """Steps, fates and the last checkpoint, but for what a version's number is in: it moves on by
    one where a version was lost."""
    steps = [
        {
            name: v
            for name, v in step["metrics"].items()
            if not {"gap", "lag", "staleness"} & words(name)
        }
        for step in made(pushing.store_url)
    ]
    last = pushing.settings.checkpoints / f"step-{STEPS:08d}"
    state = state_of(last, pushing.settings.state_dir / "whole.pt")
    return {"steps": steps, "turns": fates(pushing.store_url), "state": state}


def words(name: str) -> set[str]:
    return set(name.split("_"))


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=[] if point in TELLING else pytest.mark.slow)
        for point in OF_STEP_2
    ],
)
def test_a_killed_push_and_its_restart(
    point: str,
    runs: Runs,
    engine: VllmProcess,
    model: Path,
    unkilled: dict[str, Any],
    tmp_path: Path,
) -> None:
    with pushing_ranks(runs, engine, model, tmp_path / "state") as pushing:
        fill(pushing.store_url, groups=10)
        order = {"at": point, "nth": OF_STEP_2[point], "linger_s": LINGER_S}
        assert not pushing.run(until=STEPS, **order)
        whole = [
            checkpoint_step(folder) for folder in list_checkpoints(pushing.settings.checkpoints)
        ]
        if point in PUSH_POINTS:  # the checkpoint is written beside the push, at its own pace
            assert whole in ([1], [1, 2])
        else:
            assert whole == ([1] if point == "while it is written" else [1, 2])
        committed = [step.step for step in steps_of(pushing.store_url)]
        assert committed == ([1, 2] if point == "after the commit" else [1])
        assert pushing.run(until=len(committed))  # it serves, and has nothing to train
        pushing.agree()
        assert pushing.run(until=STEPS)
        pushing.agree()
        found = left(pushing)
    assert len(found["steps"]) == STEPS
    assert all("loss" in step for step in found["steps"])
    same(found["steps"], unkilled["steps"])
    assert found["turns"] == unkilled["turns"]
    same(found["state"], unkilled["state"])


@pytest.mark.parametrize("point", ["pushed, not recorded", "version set, not resumed"])
def test_what_agents_sampled_meanwhile_is_trained_once(
    point: str, runs: Runs, engine: VllmProcess, model: Path, tmp_path: Path
) -> None:
    """Of a version that nobody committed, or after a wait for the restart: no call fails, and the
    recorded log-probabilities are those of the weights that the version had."""
    changes = {"checkpoint__keep": 9}
    with pushing_ranks(runs, engine, model, tmp_path / "state", **changes) as pushing:
        turns = fill(pushing.store_url, groups=6)  # of which two are of equal rewards
        assert not pushing.run(until=3, at=point, nth=3)
        agents = Agents(pushing.settings, groups=2)
        agents.start()
        if point == "pushed, not recorded":
            agents.join(60)
        assert pushing.run(until=3)
        agents.join(60)
        assert agents.failures == []
        pushing.agree()
        late = [turn for _, rollout in agents.rollouts for turn in turns_of(pushing, rollout)]
        found = fates(pushing.store_url)
        assert len(late) == 6
        assert set(found) == {*turns, *(turn.turn_id for turn in late)}
        assert {found[turn.turn_id] for turn in late} == {(3, None)}
        assert {step for step, _ in found.values()} == {None, 1, 2, 3}
        sampled = {version for turn in late for version, _ in turn.policy_versions}
        assert sampled == ({2} if point == "pushed, not recorded" else {3})
        # Version 2 was of step 2, which was made again, of the same turns; 3 is again step 1's.
        weights = pushing.trained(2 if sampled == {2} else 1)
        for turn in late:
            ids = turn.prompt_token_ids.tolist(), turn.completion_token_ids.tolist()
            compare_logprobs(list(turn.completion_logprobs), reference_logprobs(weights, *ids), GAP)


def test_calls_go_on_when_the_trainer_is_killed_while_vllm_sleeps(
    runs: Runs, engine: VllmProcess, model: Path, tmp_path: Path
) -> None:
    """Nobody starts it again: its guard wakes vLLM, with the weights of the version that it had."""
    changes = {"checkpoint__keep": 9, "gpus__share": "true"}
    with pushing_ranks(runs, engine, model, tmp_path / "state", **changes) as pushing:
        fill(pushing.store_url, groups=6)
        assert not pushing.run(until=3, at="leased, not trained", nth=2)
        agents = Agents(pushing.settings, groups=1)
        agents.start()
        agents.join(60)
        assert agents.failures == []
        assert pushing.run(until=2)
        pushing.agree()
        late = [turn for _, rollout in agents.rollouts for turn in turns_of(pushing, rollout)]
        assert len(late) == 3
        for turn in late:
            assert {version for version, _ in turn.policy_versions} == {1}
            ids = turn.prompt_token_ids.tolist(), turn.completion_token_ids.tolist()
            of_step_1 = reference_logprobs(pushing.trained(1), *ids)
            compare_logprobs(list(turn.completion_logprobs), of_step_1, GAP)


def turns_of(pushing: PushingRanks, rollout: str) -> list[Turn]:
    with Store.open(pushing.store_url, create=False) as store:
        return store.rollout_turns(rollout)
