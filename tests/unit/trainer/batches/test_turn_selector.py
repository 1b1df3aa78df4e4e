"""One agent of several is trained: which turns are, and that nothing else moves."""

from __future__ import annotations

from fnmatch import translate
from functools import partial
from re import fullmatch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from support.trainer.batch_samples import Rollout, Task, selected
from support.trainer.row_samples import turn
from tracegrad.turn_scopes import TurnScope
from tracegrad_trainer.batches import BatchSettings
from tracegrad_trainer.batches.turn_selector import matches, unmatched_patterns
from tracegrad_trainer.losses import AdvantageMemory, compute_advantages, preset

PLAN, WRITE, REVISE = (
    turn("plan", [1], [2], model="m-candidate"),
    turn("write", [3], [4, 5], model="large"),
    turn("revise", [6], [7], asked_model="small"),
)
SCOPES = {
    "plan": TurnScope("planner", ("solve", "solve/planner")),
    "write": TurnScope("writer", ("solve", "solve/writer", "solve/writer/llm")),
    "revise": TurnScope("writer-2", ("solve", "solve/writer")),
}


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({}, ["plan", "write", "revise"]),
        ({"agents": ["planner"]}, ["plan"]),
        ({"agents": ["writer*"]}, ["write", "revise"]),
        ({"agents": ["planner", "writer-?"]}, ["plan", "revise"]),
        ({"agents": ["!planner"]}, ["write", "revise"]),
        ({"agents": ["writer*", "!*-2"]}, ["write"]),
        ({"agents": ["Planner"]}, []),
        ({"models": ["large"]}, ["write"]),
        ({"models": ["large"], "agents": ["planner"]}, []),
        ({"models": ["small"]}, ["revise"]),
        ({"models": ["m", "!small"]}, ["plan"]),
        ({"models": ["m-candidate"]}, ["plan"]),
        ({"span_paths": ["*/writer"]}, ["write", "revise"]),
        ({"span_paths": ["*/writer/*"]}, ["write"]),
        ({"span_paths": ["!*/llm"]}, ["plan", "revise"]),
    ],
)
def test_patterns_choose_turns(settings: dict[str, list[str]], trained: list[str]) -> None:
    task = Task("g", [Rollout("r", 1.0, [PLAN, WRITE, REVISE])])
    chosen = selected([task], scopes=SCOPES, **settings)
    assert sorted(chosen.trained) == sorted(trained)
    assert set(chosen.skipped.values()) <= {"turn_not_selected"}
    assert chosen.stats.get("skipped_turn_not_selected", 0) == 3 - len(trained)


def test_a_turn_of_which_nothing_is_known_fits_no_agent() -> None:
    task = Task("g", [Rollout("r", 1.0, [PLAN])])
    assert selected([task], agents=["*"]).trained == []
    assert selected([task], agents=["!writer"]).trained == ["plan"]


def test_what_is_not_selected_stays_context() -> None:
    reply = turn("reply", [8], [9], parent=PLAN)
    task = Task("g", [Rollout("r", 1.0, [PLAN, reply])])
    scopes = {"plan": TurnScope("planner"), "reply": TurnScope("writer")}
    [row] = selected([task], scopes=scopes, agents=["writer"]).rows
    assert row.input_ids.tolist() == [1, 2, 8, 9]
    assert row.keep.tolist() == [False, False, False, True]


@given(st.lists(st.sampled_from(["planner", "writer", "writer-2"]), max_size=3))
def test_no_selection_moves_an_advantage(agents: list[str]) -> None:
    """The baseline is the group's, and a reward the rollout's, whoever of its agents learns."""
    tasks = [
        Task("g", [Rollout(f"r{n}", reward, _named(f"{n}")) for n, reward in enumerate([1, 0, 0])])
    ]
    scopes = {f"{n} {name}": scope for n in range(3) for name, scope in SCOPES.items()}
    grpo = preset("grpo", advantage="dr_grpo")

    def advantages(**settings: object) -> dict[str, float]:
        memory: AdvantageMemory = {}
        rule = partial(compute_advantages, grpo, memory=memory)
        rows = selected(tasks, advantages=rule, scopes=scopes, **settings).rows  # type: ignore[arg-type]
        return {
            name: float(row.advantage[np.flatnonzero(row.keep)[0]])
            for row in rows
            for name in row.kept_turn_ids
        }

    every, some = advantages(), advantages(agents=agents)
    assert some == {name: every[name] for name in some}
    wanted = {"planner", "writer", "writer-2"} & set(agents) if agents else None
    assert len(some) == 3 * (3 if wanted is None else len(wanted))


def _named(rollout: str) -> list[object]:
    return [
        turn(f"{rollout} {name}", [number], [number + 1, number + 2])
        for number, name in enumerate(SCOPES)
    ]  # type: ignore[return-value]


@given(
    st.lists(st.text("ab*?!", min_size=2, max_size=4), max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=2),
)
def test_patterns_mean_what_they_say(patterns: list[str], names: list[str]) -> None:
    """An independent reading: no exclusion fits, and one of the others does if there are any."""

    def fits(pattern: str) -> bool:
        return any(fullmatch(translate(pattern), name) for name in names)

    excluded = any(fits(pattern[1:]) for pattern in patterns if pattern[0] == "!")
    included = [fits(pattern) for pattern in patterns if pattern[0] != "!"]
    assert matches(patterns, names) == (not excluded and (any(included) or not included))


def test_a_pattern_that_fits_nothing_is_named_with_what_there_is() -> None:
    settings = BatchSettings(agents=("plannner", "writer*", "!judge"), models=("m",))
    found = unmatched_patterns([PLAN, WRITE, REVISE], settings, SCOPES)
    assert [str(each) for each in found] == [
        "batches.agents = 'plannner' fits no turn; there are: 'planner', 'writer', 'writer-2'",
        "batches.agents = '!judge' fits no turn; there are: 'planner', 'writer', 'writer-2'",
    ]
    assert unmatched_patterns([], settings, {}) == []


def test_of_names_that_agents_choose_a_line_has_a_few_and_none_as_it_is() -> None:
    names = ["b\nERROR \x1b[31m", "c" * 500, *(f"d{number}" for number in range(7))]
    turns = [turn(name, [1], [2], model="m", asked_model=name) for name in names]
    [found] = unmatched_patterns(turns, BatchSettings(models=("a",)), {})
    assert str(found) == (
        "batches.models = 'a' fits no turn; there are: 'b\\nERROR \\x1b[31m',"
        f" '{'c' * 59}…', 'd0', 'd1', 'd2' and 5 more"
    )


@pytest.mark.parametrize("setting", ["agents", "models", "span_paths"])
@pytest.mark.parametrize("empty", ["", "!"])
def test_an_empty_pattern_is_refused(setting: str, empty: str) -> None:
    with pytest.raises(ValidationError, match=f"{setting}.*\n.*write a name such as writer"):
        BatchSettings.model_validate({setting: [empty]})
