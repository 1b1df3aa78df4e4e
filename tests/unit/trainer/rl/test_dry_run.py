"""What a step would be made of: the same as it is then made of, and nothing is changed."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console

from support.trainer.step_samples import fill, rollout, train, trainer_settings
from tracegrad.events import Event, Reward, RolloutStarted, Turn
from tracegrad.store import Ledger, PolicyVersion, StepHistory, Store
from tracegrad.store.types import COMPOSED_SOURCE
from tracegrad_trainer.batches import PackingRule, pack
from tracegrad_trainer.batches.packing import ATTENTION_PARITY
from tracegrad_trainer.cli import dry_run
from tracegrad_trainer.cli.render_status import format_step_line
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.losses import preset
from tracegrad_trainer.rl.dry_run import StepPlan, plan_step


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    return trainer_settings(tmp_path)


def planned(settings: TrainerSettings) -> StepPlan:
    with Store.open(settings.proxy.store) as store:
        return plan_step(settings, store)


def equal_rewards(store: Store, name: str, *, at: float) -> None:
    for n in range(2):
        store.append(rollout(f"{name}{n}", name, reward=1.0, seed=50 + n, at=at + n))


def test_the_plan_is_what_is_trained_then(settings: TrainerSettings) -> None:
    with Store.open(settings.proxy.store) as store:
        fill(store, 3)
        plan = plan_step(settings, store)
        assert Ledger(store).ready() == 6, "nothing is leased"
        assert store.turn_counts().pending == {"waiting": 18}
        train(settings, 1)
        [step] = StepHistory(store).steps()
    assert (plan.step, plan.version, plan.more) == (1, 0, 1)
    assert plan.stats.items() <= step.metrics.items()
    assert plan.trained == step.metrics["turns_trained"] == 12
    assert sum(load.targets for load in plan.loads) == step.metrics["tokens_trained"]
    assert plan.tokens == step.metrics["row_tokens"]
    assert [group.group_id for group in plan.groups] == ["t0", "t1"]
    assert plan.groups[0].rewards == [1.0, 0.0]
    assert plan.groups[0].advantages == pytest.approx((-0.70710, 0.70710), abs=1e-4)
    after = planned(settings)
    assert (after.step, after.version, [g.group_id for g in after.groups]) == (2, 1, ["t2"])


def test_rows_are_packed_as_the_step_packs_them(settings: TrainerSettings) -> None:
    """By what they cost in the model at hand."""
    with Store.open(settings.proxy.store) as store:
        fill(store, 3)
        with patch("tracegrad_trainer.rl.dry_run.pack", wraps=pack) as packing:
            plan_step(settings, store)
        train(settings, 1)
        step = StepHistory(store).step(1)
    assert step is not None
    rule: PackingRule = packing.call_args.kwargs["rule"]
    assert asdict(rule) == (step.batch or {})["packing"]
    assert rule.parity != ATTENTION_PARITY


def test_tasks_that_nobody_named_are_shown_by_what_was_asked(
    settings: TrainerSettings,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    question = "Which river runs through Vienna, and through which other capitals?"
    with Store.open(settings.proxy.store) as store:
        for at, (name, task) in enumerate(
            [("a0", "0123456789abcdef"), ("a1", "0123456789abcdef"), ("b0", "fedcba9876543210")]
        ):
            opened, *rest = rollout(name, task, reward=float(at), seed=at, at=10.0 + at)
            assert isinstance(opened, RolloutStarted)
            store.append([replace(opened, task={"question": question}), *rest])
    plan = planned(settings)
    [group] = plan.groups
    assert (group.group_id, group.title) == ("0123456789abcdef", question)
    assert plan.titles == {"fedcba9876543210": question}
    assert dry_run.show_dry_run(settings, Console(file=sys.stdout), False) == 0
    printed = capsys.readouterr().out
    for task_id in ("01234567", "fedcba98"):  # what --task takes
        assert f"Which river runs through Vienna, and th… · {task_id} " in printed


@pytest.mark.parametrize("columns", ["80", "120", None])
def test_tasks_that_begin_alike_are_told_apart(
    settings: TrainerSettings,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: str | None,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    prefix = "You answer with the name of a river and nothing else. " * 6
    asked = {"0123456789abcdef": "Vienna?", "fedcba9876543210": "Prague?", "00aa": "named"}
    with Store.open(settings.proxy.store) as store:
        for at, (task, question) in enumerate(asked.items()):
            for n in range(1 if question == "Prague?" else 2):
                name = f"{task}{n}"
                opened, *rest = rollout(name, task, reward=float(n), seed=n, at=10.0 + at)
                assert isinstance(opened, RolloutStarted)
                store.append([replace(opened, task={"question": prefix + question}), *rest])
    assert dry_run.show_dry_run(settings, Console(file=sys.stdout), False) == 0
    printed = capsys.readouterr().out
    shown = ("You answer w…Vienna? · 01234567", "You answer w…Prague? · fedcba98")
    for title in shown if columns is None else ():
        assert title in printed
    # In a terminal cells are broken, words and ids stay whole.
    assert all(word in printed for title in shown for word in title.split("…")[1].split())
    assert "00aa" in printed, "the id that somebody chose"
    assert prefix[:20] not in printed


def test_every_rank_has_its_micro_batches(settings: TrainerSettings) -> None:
    with Store.open(settings.proxy.store) as store:
        fill(store, 2)
    two = settings.model_copy(update={"ranks": 2})
    plan = planned(two)
    assert {load.rank for load in plan.loads} == {0, 1}
    assert len({load.rank: 0 for load in plan.loads if load.tokens}) == 2
    assert all(load.fill == load.tokens / 64 <= 1 for load in plan.loads)
    assert sum(load.rows for load in plan.loads) == 4 == sum(group.rows for group in plan.groups)


def test_groups_of_equal_rewards_are_passed_over_as_a_step_does(settings: TrainerSettings) -> None:
    with Store.open(settings.proxy.store) as store:
        for name in ("a", "b"):
            equal_rewards(store, name, at=10.0)
        fill(store, 1)
        plan = plan_step(settings, store)
        assert plan.passed == {"equal_reward": 12}
        assert ([g.group_id for g in plan.groups], plan.trained) == (["t0"], 6)
        train(settings, 1)
        assert store.turn_counts().skipped == plan.passed


def test_what_is_not_trained_is_counted_by_reason(settings: TrainerSettings) -> None:
    with Store.open(settings.proxy.store) as store:
        fill(store, 1)
        equal_rewards(store, "same", at=1004.0)
        store.record_version(PolicyVersion(2, None, "failed"))
        batches = settings.batches.model_copy(update={"max_row_tokens": 20})
        plan = plan_step(settings.model_copy(update={"batches": batches}), store)
    assert plan.version == 3, "a failed version's number is not used again"
    assert sum(plan.skipped.values()) + plan.trained == 12
    assert plan.skipped == {"over_long": 5, "equal_reward": 3}
    assert [group.skipped for group in plan.groups] == [
        {"over_long": 2},
        {"over_long": 3, "equal_reward": 3},
    ]


def test_tasks_that_lack_rollouts_are_listed(settings: TrainerSettings) -> None:
    with Store.open(settings.proxy.store) as store:
        store.append(rollout("alone", "lonely", reward=1.0, seed=1))
        store.append([RolloutStarted(rollout_id="open", task_id="lonely")])
        store.append(rollout("other", "x", reward=1.0, seed=1)[:2])
        plan = plan_step(settings, store)
    assert (plan.groups, plan.loads, plan.trained) == ([], [], 0)
    [task] = plan.waiting
    assert (task.task_id, task.ready, task.open) == ("lonely", ["alone"], 1)
    assert plan.pending == {"waiting": 3, "open": 1}


def test_rollouts_without_a_task_are_counted_where_tasks_are_compared(
    settings: TrainerSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(settings.proxy.store) as store:
        for name in ("r0", "r1"):  # as by HTTP alone: nobody opened them
            events = rollout(name, "t", reward=float(name == "r1"), seed=1)
            store.append([event for event in events if not isinstance(event, RolloutStarted)])
    plan = planned(settings)
    assert (plan.groups, plan.waiting, plan.pending) == ([], [], {"no_task": 6})
    console = Console(file=sys.stdout, width=200, color_system=None)
    assert dry_run.show_dry_run(settings, console, False) == dry_run.NOTHING
    printed = " ".join(capsys.readouterr().out.split())
    assert "turns that no step would look at yet: 6 no_task" in printed
    assert "→ Name one where a rollout begins: @trace(task=...)" in printed
    alone = settings.batches.model_copy(update={"group_size": 1, "drop_equal_reward": False})
    objective = settings.objective.model_copy(update={"advantage": "running"})
    plan = planned(settings.model_copy(update={"batches": alone, "objective": objective}))
    assert (plan.trained, plan.pending) == (6, {"waiting": 6})


def test_a_checkpoint_that_is_gone_is_a_note_not_the_end(settings: TrainerSettings) -> None:
    with Store.open(settings.proxy.store) as store:
        fill(store, 4)
        train(settings, 1)
    checkpoint = settings.checkpoints / "step-00000001"
    checkpoint.rename(settings.state_dir / "elsewhere")
    plan = planned(settings)
    assert plan.note is not None
    assert "step-00000001" in plan.note
    assert (plan.step, plan.version, plan.trained) == (2, 1, 12)


def test_refills_take_groups_until_enough_have_different_rewards(tmp_path: Path) -> None:
    settings = trainer_settings(tmp_path, data={"refill": True})
    with Store.open(settings.proxy.store) as store:
        fill(store, 1)
        equal_rewards(store, "same", at=1004.0)
        fill(store, 2, first=1)
        plan = plan_step(settings, store)
    assert [group.group_id for group in plan.groups] == ["t0", "same", "t1"]
    assert plan.more == 1


def test_it_is_printed_in_the_width_of_a_terminal_and_as_json(
    settings: TrainerSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(file=sys.stdout, width=80, force_terminal=True, color_system=None)
    assert dry_run.show_dry_run(settings, console, False) == 2
    assert "no store at" in capsys.readouterr().err
    with Store.open(settings.proxy.store) as store:
        assert dry_run.show_dry_run(settings, console, False) == 3
        assert "nothing to train" in capsys.readouterr().out
        fill(store, 3)
        equal_rewards(store, "same", at=1004.0)
    assert dry_run.show_dry_run(settings, console, False) == 0
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert "6 equal_reward" in printed
    assert dry_run.show_dry_run(settings, console, True) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(asdict(planned(settings))))


def test_it_says_by_which_states_turns_would_be_compared(
    settings: TrainerSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(settings.proxy.store) as store:
        fill(store, 1)
        keyed = rollout("keyed", "t9", reward=1.0, seed=3, at=2000.0)
        seen = rollout("seen", "t9", reward=0.0, seed=4, at=2001.0)
        store.append([_at(event, state_key="door") for event in keyed])
        store.append([_at(event, observation="0f" * 16) for event in seen])
    console = Console(file=sys.stdout, width=200, color_system=None)
    dry_run.show_dry_run(settings, console, False)
    assert "equal states" not in capsys.readouterr().out
    compared = settings.model_copy(update={"objective": preset("gigpo")})
    dry_run.show_dry_run(compared, console, False)
    printed = " ".join(capsys.readouterr().out.split())
    counts = planned(compared).stats
    given, observed, unknown = (counts[f"states_{name}"] for name in KNOWN)
    assert min(given, observed, unknown) > 0
    assert (
        f"turns are compared among equal states: {given:.0f} states named by the agent,"
        f" {observed:.0f} by what was observed last, {unknown:.0f} unknown"
    ) in printed


def test_one_agent_of_several_is_trained_and_a_name_that_nobody_has_is_said(
    settings: TrainerSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(settings.proxy.store) as store:
        for n in range(2):
            events = rollout(f"r{n}", "t0", reward=float(n), seed=n, at=1000.0 + n)
            turns = [event.turn_id for event in events if isinstance(event, Turn)]
            agents = dict(zip(turns, ("planner", "writer", "planner"), strict=True))
            store.append(
                [
                    replace(event, agent_name=agents[event.turn_id])
                    if isinstance(event, Turn)
                    else event
                    for event in events
                ]
            )
    batches = settings.batches.model_copy(update={"agents": ("writer", "judge")})
    chosen = settings.model_copy(update={"batches": batches})
    plan = planned(chosen)
    assert (plan.trained, plan.skipped) == (2, {"turn_not_selected": 4})
    assert plan.groups[0].advantages == planned(settings).groups[0].advantages
    console = Console(file=sys.stdout, width=200, color_system=None)
    dry_run.show_dry_run(chosen, console, False)
    printed = capsys.readouterr().out
    assert "batches.agents = 'judge' fits no turn; there are: 'planner', 'writer'" in printed
    assert "4 turn_not_selected" in printed
    train(chosen, 1)
    with Store.open(settings.proxy.store) as store:
        [step] = StepHistory(store).steps()
        kept = [store.rollout(f"r{n}").dispositions for n in range(2)]
    assert step.metrics["turns_trained"] == 2
    reasons = Counter(turn.skip_reason for each in kept for turn in each.values())
    assert reasons == {None: 2, "turn_not_selected": 4}


def test_what_a_selection_that_fits_nothing_would_not_use_up(settings: TrainerSettings) -> None:
    with Store.open(settings.proxy.store) as store:
        fill(store, 5)
    batches = settings.batches.model_copy(update={"models": ("large",)})
    chosen = settings.model_copy(update={"batches": batches})
    plan = planned(chosen)
    assert (plan.trained, plan.given_back, plan.passed) == (0, True, {})
    assert plan.skipped == {"turn_not_selected": 6}, "of the last batch that was looked at"
    file = StringIO()
    dry_run.show_dry_run(chosen, Console(file=file, width=200, color_system=None), False)
    assert "what is ready would be given back, and not be used up" in file.getvalue()
    assert not planned(settings).given_back


KNOWN = ("given", "observed", "unknown")


def _at(event: Event, **state: Any) -> Event:
    return replace(event, **state) if isinstance(event, Turn) else event


def test_a_batch_of_few_groups_with_a_signal_is_announced_as_a_share_of_a_step(
    settings: TrainerSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(settings.proxy.store) as store:
        fill(store, 1)
        equal_rewards(store, "same", at=1004.0)
        plan = plan_step(settings, store)
        assert (plan.share, plan.stats["groups_trained"]) == (0.5, 1)
        console = Console(file=sys.stdout, width=100, color_system=None)
        assert dry_run.show_dry_run(settings, console, False) == 0
        said = "1 of the 2 groups that are wanted would be trained: the step counts for 0.5 of one"
        assert said in " ".join(capsys.readouterr().out.split())
        train(settings, 1)
        [step] = StepHistory(store).steps()
    assert step.metrics["step_share"] == plan.share
    assert "1 of 2 groups with a signal: 0.5 of a step" in format_step_line(step)
    whole = planned(
        settings.model_copy(
            update={"optim": settings.optim.model_copy(update={"scale_by_groups": False})}
        )
    )
    assert whole.share == 1


def test_it_says_which_rule_would_use_which_rollout_and_what_similar_ones_wait_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = {"url": "http://127.0.0.1:1/v1", "model": "m", "rubric": "r", "groups": "similar"}
    settings = trainer_settings(
        tmp_path,
        rewards={"judge": judge, "weights": {"reward": 1}},
        batches={"groups": 1, "group_size": 3, "tokens_per_micro_batch": 64},
    )
    now = time.time()
    with Store.open(settings.proxy.store) as store:
        fill(store, 1, size=3)
        for n in range(3):
            given = {"source": COMPOSED_SOURCE, "value": float(n == 0)}
            store.append([Reward(rollout_id=f"t0r{n}", **given)])
        for name, text, at in (
            ("a", "Where is my order?", now - 50),
            ("b", "Where is my order now?", now - 40),
            ("c", "Write a poem.", now - 30),
        ):
            store.append(rollout_asked(name, text, at=at))
        store.append(rollout("d", "", reward=0.0, seed=9, at=now - 20)[1:])
        plan = plan_step(settings, store)
    assert plan.judge_groups is not None
    [similar, alone] = plan.judge_groups
    assert (similar.rollouts, similar.lacks, alone.rollouts) == (["a", "b"], 1, ["c"])
    assert similar.smaller_in_s == pytest.approx(120 - 40, abs=30)
    assert alone.smaller_in_s is None
    assert plan.not_judged == 1, "its texts were not kept"
    assert plan.uses == {
        "objective.advantage": ["t0r0", "t0r1", "t0r2"],
        "rewards.judge.groups": ["a", "b"],
    }
    console = Console(file=sys.stdout, width=120, color_system=None)
    assert dry_run.show_dry_run(settings, console, False) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 rollouts without a task would be judged with similar ones" in printed
    assert "Where is my order?" in printed
    assert "one is compared with none" in printed


def rollout_asked(name: str, text: str, *, at: float) -> list[Event]:
    asked = {"messages": [{"role": "user", "content": text}], "model": "m"}
    opened, *events = rollout(name, "", reward=0.0, seed=1, at=at - 6)
    events = [
        replace(each, request=asked, dialect="chat") if isinstance(each, Turn) else each
        for each in events
        if not isinstance(each, Reward)
    ]
    return [replace(opened, task_id=None), *events]
