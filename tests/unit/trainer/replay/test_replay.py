"""A recorded step, run again: the same to the last bit, and nothing is changed by it."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from support.trainer.step_samples import rollout, trained
from tracegrad.events import Reward, Turn, logprob_array, token_id_array
from tracegrad.store import Store
from tracegrad_trainer.batches import PackingRule
from tracegrad_trainer.batches.packing import ATTENTION_PARITY
from tracegrad_trainer.cli.replay import show_candidates, show_replay
from tracegrad_trainer.config.loading import without_unused
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine.config import AdamwImplementation
from tracegrad_trainer.engine.distributed import compute_dtype
from tracegrad_trainer.replay import replay as replay_module
from tracegrad_trainer.replay import run as replay_run
from tracegrad_trainer.replay.load import (
    RecordedStep,
    ReplayError,
    list_candidates,
    load_recorded_step,
    recorded_settings,
)
from tracegrad_trainer.replay.replay import (
    ReplayRequest,
    ReplayResult,
    by_gradient_share,
    replay,
    with_other_objective,
)
from tracegrad_trainer.rl.step_inputs import StepInputs

STEPS = 3


@dataclass(frozen=True)
class Run:
    settings: TrainerSettings
    url: str

    @property
    def state_dir(self) -> Path:
        return self.settings.state_dir

    def replay(self, **asked: object) -> ReplayResult:
        with Store.open(self.url, create=False) as store:
            return replay(store, self.state_dir, ReplayRequest(**asked))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps were taken, each of two groups; two checkpoints are left."""
    settings = trained(tmp_path_factory.mktemp("run"), 2 * STEPS, STEPS)
    return Run(settings, settings.proxy.store)


def contents(run: Run) -> dict[str, str]:
    """Digests of all that a run has on the disk, but SQLite's own shared memory."""
    return {
        str(path.relative_to(run.state_dir)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.state_dir.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
    }


def test_every_number_is_reproduced_and_nothing_is_written(run: Run) -> None:
    before = contents(run)
    found = run.replay(step=3)
    assert found.equal
    assert found.differing == []
    assert {"loss", "grad_norm", "k3", "ess", "reward_mean", "lr"} <= found.compared.keys()
    assert found.compared["loss"][0] == found.compared["loss"][1] != 0
    assert contents(run) == before


def test_a_step_is_replayed_by_the_adamw_and_the_packing_that_it_was_taken_with(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps recorded before there was a choice do not say it."""
    asked: list[tuple[str, PackingRule]] = []
    make, load = replay_run.build_learner, replay_module.load_recorded_step

    def spy(*args: Any, adamw: AdamwImplementation, packing: PackingRule) -> Any:
        asked.append((adamw, packing))
        return make(*args, adamw=adamw, packing=packing)

    def without(*args: Any, **kwargs: Any) -> RecordedStep:
        found = load(*args, **kwargs)
        kept = found.batch.model_dump(exclude={"adamw", "packing"})
        return replace(found, batch=StepInputs.model_validate(kept))

    monkeypatch.setattr(replay_run, "build_learner", spy)
    assert run.replay(step=3).equal
    monkeypatch.setattr(replay_module, "load_recorded_step", without)
    run.replay(step=3)
    (now, own), (before, usual) = asked
    assert (now, before) == ("fused", "foreach")
    assert usual == PackingRule(ATTENTION_PARITY, aligned=False)
    assert own.aligned
    assert own.parity != ATTENTION_PARITY, "that of the model, which is much smaller"


def test_weights_that_were_frozen_in_float32_are_so_again(run: Run) -> None:
    with Store.open(run.url, create=False) as store:
        found = load_recorded_step(store, 3, run.state_dir)
    found.step.settings["fsdp"]["frozen_dtype"] = "bfloat16"
    assert recorded_settings(found)["fsdp"]["frozen_dtype"] == "bfloat16"
    del found.step.settings["fsdp"]["frozen_dtype"]
    assert recorded_settings(found)["fsdp"]["frozen_dtype"] == "float32"


@pytest.mark.parametrize(
    ("recorded", "replayed"),
    [("bfloat16", torch.bfloat16), ("float32", torch.float32), (None, torch.float32)],
)
def test_a_step_is_replayed_in_the_dtype_that_it_was_made_in(
    run: Run, recorded: str | None, replayed: torch.dtype
) -> None:
    """Whatever "auto" is on this machine, and also where a step says nothing of it."""
    with Store.open(run.url, create=False) as store:
        found = load_recorded_step(store, 3, run.state_dir)
    assert found.step.settings["fsdp"]["compute_dtype"] == "float32"
    changed = found.step.settings["fsdp"] | {"compute_dtype": recorded, "device": "cuda"}
    settings = found.step.settings | {
        "fsdp": {name: value for name, value in changed.items() if value is not None}
    }
    found = replace(found, step=replace(found.step, settings=settings))
    resolved = TrainerSettings.model_validate(without_unused(recorded_settings(found)))
    assert compute_dtype(resolved.fsdp) == replayed


def test_a_verdict_by_other_bounds_is_no_difference(run: Run) -> None:
    """Steps recorded before there were quantiles."""
    found = run.replay(step=3)
    assert {"mismatch", "gap_p50", "gap_p99"} <= found.compared.keys()
    before = dict(found.recorded.step.metrics)
    before["mismatch"] = 1 - before["mismatch"]
    assert with_metrics(found, before).differing == ["mismatch"]
    for name in ("gap_p50", "gap_p99", "gap_p50_bound"):
        del before[name]
    assert with_metrics(found, before).equal


def with_metrics(found: ReplayResult, metrics: dict[str, Any]) -> ReplayResult:
    step = replace(found.recorded.step, metrics=metrics)
    return replace(found, recorded=replace(found.recorded, step=step))


def test_the_last_step_is_the_one_meant_and_steps_differ(run: Run) -> None:
    assert run.replay().recorded.step.step == 3
    assert run.replay(step=1).compared["loss"] != run.replay(step=3).compared["loss"]


def test_a_difference_of_the_last_bit_is_seen(run: Run) -> None:
    found = run.replay(step=3)
    loss = found.replayed.metrics["loss"]
    off = found.replayed.metrics | {"loss": loss * (1 + 2**-52)}
    other = replace(found, replayed=replace(found.replayed, metrics=off))
    assert other.differing == ["loss"]
    assert not other.equal


def test_other_weights_give_other_numbers(run: Run) -> None:
    wrong = run.state_dir / "checkpoints" / "step-00000003"
    found = run.replay(step=3, checkpoint=wrong)
    assert {"loss", "grad_norm", "entropy"} <= set(found.differing)
    assert "reward_mean" not in found.differing


def test_rewards_and_turns_that_came_later_do_not_matter(run: Run) -> None:
    with Store.open(run.url) as store:
        late = Turn(
            rollout_id="t4r0",
            dialect="chat",
            model="m",
            prompt_token_ids=token_id_array([1, 2]),
            completion_token_ids=token_id_array([3]),
            completion_logprobs=logprob_array([-1.0]),
            policy_versions=((0, 1),),
        )
        store.append([late, Reward(rollout_id="t4r0", value=0.25)])
        store.append([Reward(rollout_id="t4r1", value=7.0, turn=0)])
    found = run.replay(step=3)
    assert found.equal
    assert {rollout.reward for rollout in found.recorded.rollouts} == {0.0, 1.0}


def test_another_objective_stands_beside_the_recorded_one(run: Run) -> None:
    found = run.replay(step=3, preset="dr_grpo", overrides=["objective.clip_high=0.5"])
    assert found.equal, "the recorded one is replayed too"
    assert found.other is not None
    assert found.other_name == "dr_grpo, clip_high=0.5"
    assert found.other.metrics["loss"] != found.replayed.metrics["loss"]
    assert found.other.metrics["entropy"] == found.replayed.metrics["entropy"], "the same weights"
    as_json = json.loads(json.dumps(found.as_json()))
    assert as_json["metrics"]["loss"]["other"] == found.other.metrics["loss"]
    assert len(as_json["other_turns"]) == len(as_json["turns"]) == 12


def test_what_is_set_changes_only_that(run: Run) -> None:
    found = run.replay(step=3, overrides=["optim.lr=0.5"])
    assert found.other is not None
    assert found.other.metrics == found.replayed.metrics | {"lr": 0.5}


def test_a_preset_is_taken_whole_and_settings_change_the_recorded_one() -> None:
    stored: dict[str, Any] = {
        "objective": {"preset": "grpo", "clip_high": 0.3, "judge": None},
        "optim": {"lr": 1},
    }
    preset = with_other_objective(
        stored, ReplayRequest(preset="gspo", overrides=["objective.clip_low=0.1"])
    )
    assert preset["objective"] == {"preset": "gspo", "clip_low": 0.1}
    kept = with_other_objective(
        stored, ReplayRequest(overrides=["optim.lr=0.25", "objective.ratio=turn"])
    )
    assert kept["objective"] == stored["objective"] | {"ratio": "turn"}
    assert kept["optim"] == {"lr": 0.25, "scale_by_groups": False}  # as it was done then
    assert stored["optim"] == {"lr": 1}, "the record stays as it is"


def test_pulls_say_what_the_step_does_to_each_turn(run: Run) -> None:
    found = run.replay(step=3)
    turns = found.replayed.turns
    assert {turn.turn_id for turn in turns} == found.recorded.trained
    assert sum(abs(turn.gradient_share) for turn in turns) == pytest.approx(1)  # shares in double
    # By the first gradient of a policy everything that was better is made likelier.
    assert all(turn.gradient_share * turn.advantage > 0 for turn in turns)
    # Parts of both signs, each added up in float32, in whatever order a processor's kernels take.
    size = sum(abs(turn.loss) for turn in turns)
    rounding = sum(turn.tokens for turn in turns) * 2**-23 * size
    assert sum(turn.loss for turn in turns) == pytest.approx(
        found.replayed.metrics["loss"], rel=0, abs=rounding
    )
    assert rounding < 1e-3 * size, "a part that is missing would be seen"
    assert sum(turn.tokens for turn in turns) == found.replayed.metrics["tokens_trained"]
    assert {turn.staleness for turn in turns} == {2.0}
    first = next(turn for turn in turns if turn.turn_id == "t4r1.2")
    assert (first.rollout_id, first.index, first.reward) == ("t4r1", 2, 0.0)
    ordered = [abs(turn.gradient_share) for turn in by_gradient_share(turns)]
    assert ordered == sorted(ordered, reverse=True)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"step": 9}, r"^there is no step 9: the last one is 3"),
        ({"step": 2}, r"^step 2 began with the weights of step 1, .* gone .* those of 2, 3"),
        ({"step": 2, "checkpoint": Path("/nowhere")}, r"^--checkpoint /nowhere: there is no such"),
        ({"preset": "best"}, r"^--preset best: there is none; take one of grpo, "),
        (
            {"preset": "ppo"},
            r"^ppo: it learns values, .* step 3 began with have no value head: step 1",
        ),
        ({"preset": "dpo"}, r"^dpo: it learns from pairs, and a step was made of groups"),
        (
            {"overrides": ["data.tags={}"]},
            r"what may change is in objective, optim, batches, fsdp$",
        ),
        ({"overrides": ["objective.preset=dapo"]}, r"say --preset dapo$"),
        (
            {"overrides": ["fsdp.lora.rnk=4"]},
            r"^fsdp\.lora\.rnk=4: fsdp\.lora\.rnk: .* did you mean fsdp\.lora\.rank",
        ),
        ({"overrides": ["optim.lr.x=1"]}, r"lr is not a table$"),
        ({"overrides": ["clip"]}, r"write it as table\.name=value$"),
        (
            {"overrides": ["objective.clip_high=-1"]},
            r"^clip_high=-1: objective\.clip_high: .*greater",
        ),
        ({"overrides": ["objective.clip_top=1"]}, r"objective\.clip_top: there is no such setting"),
    ],
)
def test_what_cannot_be_says_so_in_one_line(run: Run, asked: dict[str, object], words: str) -> None:
    with pytest.raises(ReplayError, match=words) as caught:
        run.replay(**asked)
    assert "\n" not in str(caught.value)


def test_the_first_step_begins_with_the_model_folder(tmp_path: Path) -> None:
    settings = trained(tmp_path, 2, 1)
    with Store.open(settings.proxy.store) as store:
        found = replay(store, settings.state_dir, ReplayRequest(step=1))
        valued = replay(store, settings.state_dir, ReplayRequest(step=1, preset="ppo"))
    assert found.equal
    assert valued.other is not None
    assert valued.other.metrics["value_loss"] > 0
    assert found.recorded.checkpoint is None
    assert found.as_json()["checkpoint"] is None


def test_the_list_says_which_steps_can_be_replayed_and_why_others_cannot(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(run.url, create=False) as store:
        listed = list_candidates(store, run.state_dir, limit=10)
    assert [(one.step.step, one.problem) for one in listed] == [
        (3, None),
        (2, "the checkpoint before it is gone"),
        (1, None),
    ]
    assert show_candidates(run.url, run.state_dir, Console(), as_json=True) == 0
    [newest, *_] = json.loads(capsys.readouterr().out)
    assert (newest["step"], newest["problem"]) == (3, None)


def test_a_store_without_steps_says_so(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/store.db") as store:
        store.append(rollout("r", "t", reward=1.0, seed=0))
        with pytest.raises(ReplayError, match="nothing was trained yet"):
            replay(store, tmp_path, ReplayRequest())


def test_exit_codes_mean_something(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = run.state_dir / "checkpoints" / "step-00000003"
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(file=sys.stdout)
    codes = [
        show_replay(run.url, run.state_dir, asked, console, turns=turns)
        for asked, turns in (
            (ReplayRequest(step=3), 2),
            (ReplayRequest(step=3, checkpoint=wrong), None),
            (ReplayRequest(step=9), None),
        )
    ]
    assert codes == [0, 1, 2]
    printed = capsys.readouterr()
    assert "reproduced: all" in printed.out
    assert "the 2 of 12 turns with the largest share of the gradient" in printed.out
    assert "different:" in printed.out
    assert max(len(line) for line in printed.out.splitlines()) <= 80
    assert printed.err == "trainer replay: there is no step 9: the last one is 3 (--list)\n"
