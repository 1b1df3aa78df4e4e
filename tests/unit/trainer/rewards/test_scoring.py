"""Finished rollouts are scored by real processes, once, and their rewards are the sums."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.store.events import make_turn, rollout_events
from support.trainer import scorers
from tracegrad.events import Outcome, Reward
from tracegrad.store import Ledger, Store
from tracegrad.store.read.held_out import held_out_rollouts
from tracegrad.store.types import COMPOSED_SOURCE, SCORER_SOURCE
from tracegrad_trainer.rewards.config import RewardSettings
from tracegrad_trainer.rewards.functions import FunctionUnusable
from tracegrad_trainer.rewards.scoring import Again, ScoringRun, ScoringScope, ScoringTotals

FUNCTION = "support.trainer.scorers:{}"


@pytest.fixture(autouse=True)
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "calls"
    file.touch()
    monkeypatch.setenv(scorers.CALLS, str(file))
    tests = str(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", tests)
    return file


def settings(*functions: str, **given: Any) -> RewardSettings:
    paths = {"functions": [FUNCTION.format(name) for name in functions]} if functions else {}
    return RewardSettings.model_validate({"retries": 0, **paths, **given})


def score(
    store: Store,
    wanted: RewardSettings,
    *,
    ids: Sequence[str] | None = None,
    again: Again = "no",
    **scope: Any,
) -> ScoringTotals:
    async def run() -> ScoringTotals:
        where = ScoringScope(**scope)
        async with ScoringRun(store, wanted, where, first_pause_s=0.01) as scoring:
            return await scoring.finish(rollout_ids=ids, again=again)

    return asyncio.run(run())


def add(store: Store, *names: str, **more: Any) -> None:
    for name in names:
        store.append(rollout_events(name, **{"reward": None, **more}))


def reward_of(store: Store, name: str) -> float | None:
    return store.rollout(name).summary.reward


def failures(store: Store, name: str) -> list[str | None]:
    return [each.error for each in store.rollout(name).failed_scorings]


def test_a_functions_number_is_a_part_and_the_sum_the_reward(store: Store, calls: Path) -> None:
    add(store, "r1", "r2")
    totals = score(store, settings("resolved"))
    assert (totals.scored, totals.failed, totals.composed) == (2, 0, 2)
    assert (reward_of(store, "r1"), reward_of(store, "r2")) == (1.0, 0.0)
    part, whole = store.rewards("r1")
    assert (part.name, part.source, part.label) == (
        "resolved",
        SCORER_SOURCE,
        "function support.trainer.scorers:resolved",
    )
    assert (whole.name, whole.source, whole.comment) == (
        "reward",
        COMPOSED_SOURCE,
        "resolved 1 x 1",
    )
    groups = Ledger(store).lease(groups=1, group_size=2, owner="me", ttl_s=60, composed=True)
    assert {each.rollout_id: each.reward for each in groups[0].rollouts} == {"r1": 1.0, "r2": 0.0}
    assert Counter(calls.read_text().split("\n")[:-1]) == {"resolved r1": 1, "resolved r2": 1}


@pytest.mark.databases("sqlite")
def test_held_out_ones_are_scored_whatever_training_selects(store: Store, calls: Path) -> None:
    """A gate waits for their sums, and takes no part of one for it."""
    only, held_out = {"split": "train"}, {"split": "held_out"}
    add(store, "marked", held_out=True)
    add(store, "tagged", tags=held_out)
    add(store, "trained", tags=only)
    add(store, "other")

    def judged(composed: bool) -> dict[str, float]:
        with store.reading() as connection:
            found = held_out_rollouts(connection, held_out, [0], composed=composed)
        return {each.rollout_id: each.reward for each in found if each.reward is not None}

    store.append([Reward(rollout_id="tagged", value=0.5)])
    assert judged(composed=False) == {"tagged": 0.5}
    assert judged(composed=True) == {}
    assert score(store, settings("resolved"), tags=only, held_out=held_out).scored == 3
    assert sorted(judged(composed=True)) == ["marked", "tagged"]
    assert store.rewards("other") == []


@pytest.mark.databases("sqlite")
def test_all_that_a_function_may_give(store: Store) -> None:
    add(store, "r")
    wanted = settings("by_turns", "last_words", "parts", "scalar", "prints")
    score(store, wanted)
    given = {each.name: each.value for each in store.rewards("r") if each.source == SCORER_SOURCE}
    assert given == {
        "by_turns": 2, "last_words": 0, "kind": 0.5, "brief": 1, "scalar": 0.25, "prints": 1,
    }  # fmt: skip
    assert reward_of(store, "r") is None, "the function gave `unsure` as unknown"
    weights = {"by_turns": 1, "kind": 1, "scalar": -1}
    score(store, settings("by_turns", "last_words", "parts", "scalar", "prints", weights=weights))
    assert reward_of(store, "r") == 2.25, "other weights, from the same parts"


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("text", "text gave '0.5' (str), which is no number"),
        ("not_a_number", "not_a_number gave nan; give a finite number"),
        ("raises", "raises raised RuntimeError: no such file"),
        ("hangs", "hangs timed out after 0.5 s"),
        ("exits", "the process of exits ended with exit code 7"),
        ("crashes", "the process of crashes was killed by SIGSEGV"),
    ],
)
def test_a_scoring_that_failed_leaves_the_rollout_unscored_with_the_reason(
    store: Store, function: str, said: str
) -> None:
    add(store, "r")
    wanted = settings(function, "by_turns", timeout_s=0.5 if function == "hangs" else 30)
    totals = score(store, wanted)
    assert (totals.scored, totals.failed) == (1, 1), "the others go on"
    [error] = failures(store, "r")
    assert str(error).startswith(said)
    detail = store.rollout("r")
    assert (detail.summary.reward, detail.summary.state) == (None, "scoring_failed")


@pytest.mark.databases("sqlite")
def test_attempts_are_made_again_but_for_answers_that_will_not_change(
    store: Store, calls: Path
) -> None:
    add(store, "r")
    totals = score(store, settings("fails_once", "raises", "text", retries=2))
    assert (totals.scored, totals.failed) == (1, 2)
    attempts = {each.scorer: each.attempts for each in store.rollout("r").scorings}
    assert attempts == {"fails_once": 2, "raises": 3, "text": 1}


@pytest.mark.databases("sqlite")
def test_a_scorer_that_cannot_tell_leaves_the_reward_unknown(store: Store) -> None:
    add(store, "r")
    totals = score(store, settings("cannot_tell", "by_turns"))
    assert (totals.scored, totals.unknown, totals.failed) == (1, 1, 0)
    assert (reward_of(store, "r"), store.rollout("r").summary.state) == (None, "named_reward")
    wanted = {"weights": {"cannot_tell": 1, "by_turns": 1}, "optional": ["cannot_tell"]}
    score(store, settings("cannot_tell", "by_turns", **wanted))
    assert reward_of(store, "r") == 2.0


@pytest.mark.databases("sqlite")
def test_a_part_of_another_scorers_name_is_refused(store: Store) -> None:
    add(store, "r")
    score(store, settings("another_scorers_part", "by_turns"))
    assert failures(store, "r") == [
        "another_scorers_part gave a part named 'by_turns', which is another scorer's name"
    ]


@pytest.mark.databases("sqlite")
def test_a_function_that_cannot_be_imported_is_one_line(store: Store) -> None:
    with pytest.raises(FunctionUnusable, match="function 'no_such:thing' cannot be imported"):
        score(store, RewardSettings.model_validate({"functions": ["no_such:thing"]}))


@pytest.mark.databases("sqlite")
def test_commands_read_json_and_answer_by_code_or_last_line(store: Store) -> None:
    add(store, "r1", "r2")
    ends = "import json, sys; sys.exit(json.load(sys.stdin)['rollout_id'] == 'r2')"
    commands = {
        "ends": f'python3 -c "{ends}"',
        "named": {"run": "echo noise; echo ${#TRACEGRAD_ROLLOUT_ID}; echo", "read": "last_line"},
        "task": '[ "$TRACEGRAD_TASK_ID" = task ]',
    }
    score(store, settings(commands=commands))
    given = {each.name: each.value for each in store.rewards("r1")[:-1]}
    assert given == {"ends": 1.0, "named": 2.0, "task": 1.0}
    assert (reward_of(store, "r1"), reward_of(store, "r2")) == (4.0, 3.0)


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ({"run": "exit 3"}, "c ended with exit code 3"),
        ({"run": "kill -9 $$"}, "c was killed by SIGKILL"),
        ({"run": "echo fine", "read": "last_line"}, "c: its last line is 'fine'"),
        ({"run": "echo nan", "read": "last_line"}, "c gave nan; give a finite number"),
        ({"run": "true", "read": "last_line"}, "c: its last line is '', which is no number"),
        ({"run": "echo 1; exit 1", "read": "last_line"}, "c ended with exit code 1"),
        ({"run": "sleep 600"}, "c timed out after 0.5 s"),
    ],
)  # fmt: skip
def test_a_command_that_failed(store: Store, command: dict[str, str], said: str) -> None:
    add(store, "r")
    score(
        store,
        settings(commands={"c": command}, timeout_s=0.5 if "600" in said + command["run"] else 30),
    )
    [error] = failures(store, "r")
    assert str(error).startswith(said)


@pytest.mark.databases("sqlite")
def test_the_terms_are_parts_of_their_own(store: Store) -> None:
    reply = {"choices": [{"message": {"role": "assistant", "content": "so: <answer>4</answer>"}}]}
    turns = [make_turn("t1", sampled=range(30)), make_turn("t2", sampled=range(5), response=reply)]
    add(store, "r", turns=0)
    store.append(turns)
    wanted = {
        "length": {"target_tokens": 25, "over_tokens": 40},
        "format": {"pattern": r"<answer>\d+</answer>$"},
        "weights": {"length": -0.5, "format": 1.0},
    }
    score(store, settings(**wanted))
    given = {each.name: (each.value, each.label) for each in store.rewards("r")[:-1]}
    assert given == {"length": (0.25, "term length"), "format": (1.0, "term format")}
    assert reward_of(store, "r") == 0.875


def test_what_is_scored_is_scored_once_unless_asked(store: Store, calls: Path) -> None:
    add(store, "r1")
    score(store, settings("resolved"))
    assert score(store, settings("resolved")).scored == 0
    add(store, "r2")
    assert score(store, settings("resolved")).scored == 1, "what comes later"
    assert calls.read_text().count("resolved r1\n") == 1
    assert score(store, settings("resolved"), ids=["r1"], again="all").scored == 1
    assert calls.read_text().count("resolved r1\n") == 2
    assert [each.round for each in store.rollout("r1").scorings] == [0, 1]
    assert score(store, settings("resolved"), again="failed").scored == 0


@pytest.mark.databases("sqlite")
def test_what_failed_is_tried_again_where_that_is_asked(store: Store) -> None:
    add(store, "r")
    wanted = settings("fails_once")
    assert score(store, wanted).failed == 1
    assert score(store, wanted).failed == 0, "not by itself"
    assert score(store, wanted, again="failed").scored == 1
    assert (reward_of(store, "r"), failures(store, "r")) == (1.0, [])


def test_parts_that_come_late_are_revised_or_taken_back_change_the_sum(store: Store) -> None:
    wanted = settings("by_turns", weights={"by_turns": 1, "thumbs": 10})
    add(store, "r")
    store.append([Reward(rollout_id="r", value=0.3)])
    score(store, wanted)
    assert store.rollout("r").summary.reward == 0.3, "nothing was composed so far"
    lease: dict[str, Any] = {
        "groups": 1,
        "group_size": 1,
        "owner": "me",
        "ttl_s": 60.0,
        "composed": True,
    }
    assert Ledger(store).lease(**lease) == [], "it waits for thumbs"
    sums = []
    for value in (1.0, 0.5, None, 0.0):
        store.append([Reward(rollout_id="r", value=value, name="thumbs")])
        score(store, wanted)
        sums.append(reward_of(store, "r"))
    assert sums == [12.0, 7.0, None, 2.0]
    store.append([Reward(rollout_id="r", value=-1.0)])
    score(store, wanted)
    assert reward_of(store, "r") == 2.0, "a main reward from elsewhere is a part without a weight"
    composed = [each for each in store.rewards("r") if each.source == COMPOSED_SOURCE]
    assert [each.value for each in composed] == [12.0, 7.0, None, 2.0], "events, never overwrites"
    assert Ledger(store).lease(**lease)[0].rollouts[0].reward == 2.0


@pytest.mark.databases("sqlite")
def test_the_main_reward_of_somebody_may_be_a_part(store: Store) -> None:
    add(store, "r", reward=0.5)
    score(store, settings("by_turns", weights={"reward": 2, "by_turns": -0.25}))
    assert reward_of(store, "r") == 0.5


def test_a_sum_that_comes_after_training_is_said_and_not_trained(store: Store) -> None:
    wanted = settings(weights={"thumbs": 1})
    add(store, "r")
    store.append([Reward(rollout_id="r", value=1.0, name="thumbs")])
    score(store, wanted)
    ledger = Ledger(store)
    groups = ledger.lease(groups=1, group_size=1, owner="me", ttl_s=60, composed=True)
    turns = [turn.turn_id for turn in groups[0].rollouts[0].turns]
    ledger.commit_skipped(dict.fromkeys(turns, "stale"), ["r"], {"r": groups[0].lease_id})
    store.append([Reward(rollout_id="r", value=0.0, name="thumbs")])
    score(store, wanted)
    assert reward_of(store, "r") == 0.0
    assert store.late_rewards().rewards == 2, "the part, and the sum"
    assert ledger.lease(groups=1, group_size=1, owner="me", ttl_s=60, composed=True) == []


@pytest.mark.databases("sqlite")
def test_a_rollout_that_goes_on_is_scored_again(store: Store) -> None:
    """Nobody opened it, so that it was closed when it was idle, and a call came after that."""
    store.append([make_turn("t1", created_at=1000.0)])
    ledger = Ledger(store)
    assert ledger.close_idle(60) == ["r"]
    score(store, settings("by_turns"))
    assert reward_of(store, "r") == 1.0
    store.append([make_turn("t2", created_at=1001.0)])
    score(store, settings("by_turns"))
    assert (reward_of(store, "r"), store.rollout("r").summary.outcome) == (None, None)
    assert ledger.close_idle(60) == ["r"]
    score(store, settings("by_turns"))
    assert reward_of(store, "r") == 2.0


@pytest.mark.databases("sqlite")
def test_which_rollouts_are_scored(store: Store) -> None:
    add(store, "r", tags={"split": "train"})
    add(store, "other", tags={"split": "test"})
    add(store, "failed", tags={"split": "train"}, outcome=Outcome.ENV_ERROR)
    add(store, "open", tags={"split": "train"}, outcome=None)
    add(store, "empty", tags={"split": "train"}, turns=0)
    assert score(store, settings("by_turns"), tags={"split": "train"}).scored == 1
    assert reward_of(store, "r") == 2.0


def test_of_two_workers_one_writes_what_it_found(store: Store, calls: Path, url: str) -> None:
    add(store, *(f"r{number}" for number in range(6)))

    async def both() -> tuple[ScoringTotals, ScoringTotals]:
        with Store.open(url) as other:
            wanted, scope = settings("resolved"), ScoringScope()
            async with ScoringRun(store, wanted, scope) as a, ScoringRun(other, wanted, scope) as b:
                return await asyncio.gather(a.finish(), b.finish())

    totals = asyncio.run(both())
    assert sum(each.scored for each in totals) == 6
    for number in range(6):
        rewards = store.rewards(f"r{number}")
        assert Counter(each.source for each in rewards) == {SCORER_SOURCE: 1, COMPOSED_SOURCE: 1}
        assert len(store.rollout(f"r{number}").scorings) == 1


@pytest.mark.databases("sqlite")
def test_scorings_are_counted_by_scorer(store: Store) -> None:
    add(store, "r1", "r2")
    score(store, settings("by_turns", "raises", "cannot_tell"))
    counts, last = store.count_scorings()
    found = {name: (each.scored, each.unknown, each.failed) for name, each in counts.items()}
    assert found == {"by_turns": (2, 0, 0), "cannot_tell": (0, 2, 0), "raises": (0, 0, 2)}
    assert store.count_scorings(after=last) == ({}, last)
