"""OpenEnv's training traces, out and in."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from typer.testing import CliRunner, Result

from support.store.events import make_turn
from support.transfer.rollout_records import rollout_records
from tracegrad.cli.app import app
from tracegrad.events import Reward, RolloutStarted, Turn
from tracegrad.jsonutil import dump_json
from tracegrad.store import Store
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.store.read.training_samples import turn_rewards
from tracegrad_integrations.interchange.training_trace import read_trace, trace_rows


def is_exact(turn: Turn) -> bool:
    """Whether OpenEnv takes it."""
    finite = all(map(math.isfinite, turn.completion_logprobs))
    return bool(turn.prompt_token_ids and turn.completion_token_ids and finite)


@settings(max_examples=150, deadline=None)
@given(rollout_records())
def test_what_openenv_takes_comes_back(record: RolloutRecord) -> None:
    left_out: Counter[str] = Counter()
    kept = [turn for turn in record.turns if is_exact(turn)]
    rows = [json.loads(dump_json(row)) for row in trace_rows([record], left_out)]
    counted = sum(n for reason, n in left_out.items() if reason.startswith("turns: "))
    assert counted == len(record.turns) - len(kept)
    ids = {turn.turn_id: turn for turn in record.turns}
    if not kept:
        assert (rows, left_out["rollouts: no_turns"]) == ([], 1)
        return
    [row] = rows
    back = read_trace(row).as_record(99.0)
    assert [bare(turn) for turn in back.turns] == [bare(turn) for turn in kept]
    bare_record = replace(record, turns=(), rewards=())
    assert replace(back, turns=(), rewards=(), spans=()) == bare_record
    there, here = rewarded(record), rewarded(back)
    lost = {name for name, of in there.items() if of in ids and not is_exact(ids[of])}
    assert here == {name: of for name, of in there.items() if name not in lost}
    assert left_out["rewards: turn_left_out"] == len(lost)
    if len(kept) == len(record.turns):
        assert back.rewards == record.rewards
    for turn in back.turns:
        parent = ids[turn.turn_id].parent_id
        while parent is not None and not is_exact(ids[parent]):
            parent = ids[parent].parent_id
        assert turn.parent_id == parent


def rewarded(record: RolloutRecord) -> dict[str, str]:
    """Of each reward the turn that training gives it to; "": the rollout, "none": no turn."""
    found = {}
    for reward in record.rewards:
        of = list(turn_rewards([reward], record.turns))
        found[reward.reward_id] = record.turns[of[0]].turn_id if of else "none"
        if reward.turn is None:
            found[reward.reward_id] = ""
    return found


def bare(turn: Turn) -> str:
    return repr(replace(turn, request=None, response=None, parent_id=None))


# As OpenEnv's capture of a harness's calls makes them.
OPENENVS: dict[str, Any] = {
    "schema_version": 1,
    "turns": [
        {
            "node_id": "n0",
            "prompt_token_ids": [1, 2],
            "completion_token_ids": [3, 4],
            "per_token_logps": [-0.5, -0.25],
            "loss_mask": [0, 0, 1, 1],
            "request": {"messages": [{"role": "user", "content": "2+2?"}], "tools": None},
            "response": {
                "choices": [
                    {"message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}
                ]
            },
            "metadata": {"index": 0, "model": "qwen", "sampling_params": {"temperature": 0.8}},
        },
        {
            "node_id": "n1",
            "prompt_token_ids": [1, 2, 3, 4, 5],
            "completion_token_ids": [6, 7],
            "per_token_logps": [-0.5, -0.25],
            "loss_mask": [0, 0, 0, 0, 0, 1, 0],
            "metadata": {"reward": 0.5},
        },
    ],
}


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'target.db'}") as store:
        yield store


def run(store: Store, value: Any) -> Result:
    url = f"sqlite:///{store.database.describe()}"
    return CliRunner().invoke(
        app, ["import", "-"], env={"TRACEGRAD_STORE": url}, input=json.dumps(value)
    )


def test_a_trace_of_openenvs_is_a_rollout(target: Store) -> None:
    assert run(target, OPENENVS).stdout == "1 rollout: 1 new, 2 new turns, 1 new reward\n"
    assert run(target, OPENENVS).stdout == "1 rollout: 0 new\n"
    [row] = target.rollouts()
    assert (row.outcome, row.reward) == ("completed", 0.5)
    first, second = target.rollout_turns(row.rollout_id)
    assert (first.untrainable, second.untrainable) == (None, "masked")
    assert (first.model, first.sampling) == ("qwen", {"temperature": 0.8})
    assert second.parent_id == first.turn_id
    assert second.completion_logprobs.tolist() == [-0.5, -0.25]
    assert first.request == {"model": "qwen", "messages": [{"role": "user", "content": "2+2?"}]}
    assert first.created_at > 1.7e9
    task = target.rollout(row.rollout_id).task
    assert task == {
        "training_trace": {"n0": OPENENVS["turns"][0]["metadata"], "n1": {"reward": 0.5}}
    }


def test_a_reward_stays_with_its_turn_or_is_left_out_with_it(target: Store, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'source.db'}"
    with Store.open(url) as source:
        source.append([
            RolloutStarted(rollout_id="r", opened_at=1.0),
            make_turn("refused", sampled=()),
            make_turn("first", new=[7]),
            make_turn("second", new=[8]),
            make_turn("text", new=[], sampled=()),
            *(
                Reward(reward_id=f"of {turn}", rollout_id="r", value=0.5, turn=turn)
                for turn in (None, 0, 1, 2, 3, 9, -1, -2, -3, -4, -5)
            ),
        ])  # fmt: skip
    file = str(tmp_path / "traces.jsonl")
    export = ["export", "--store", url, "--layout", "openenv-trace", "-o", file]
    said = CliRunner().invoke(app, export).stderr
    assert "no_tokens (2 turns)" in said
    assert "turn_left_out (4 rewards)" in said
    here = f"sqlite:///{target.database.describe()}"
    assert CliRunner().invoke(app, ["import", "--store", here, file]).exit_code == 0
    assert [turn.turn_id for turn in target.rollout_turns("r")] == ["first", "second"]
    assert {reward.reward_id: reward.turn for reward in target.rewards("r")} == {
        "of None": None,
        "of 1": 0,
        "of 2": 1,
        "of -2": -1,
        "of -3": -2,
        "of 9": 9,  # of a turn that never was
        "of -5": -5,
    }


def test_versions_and_names_beside_ours_are_read(target: Store) -> None:
    """Who passes a trace of ours on may leave out what only we read."""
    passed_on = copy.deepcopy(OPENENVS)
    passed_on["turns"][0]["metadata"]["policy_versions"] = [[3, 1], [4, 1]]
    passed_on["turns"][1]["metadata"] |= {"agent_name": "writer", "asked_model": "coder"}
    assert run(target, passed_on).exit_code == 0
    [row] = target.rollouts()
    first, second = target.rollout_turns(row.rollout_id)
    assert first.policy_versions == ((3, 1), (4, 1))
    assert second.policy_versions == ((0, 2),)  # which says none
    assert (first.agent_name, second.agent_name) == (None, "writer")
    assert (first.asked_model, second.asked_model) == (None, "coder")


def test_what_we_say_ourselves_of_the_versions_goes_first(target: Store) -> None:
    both = copy.deepcopy(OPENENVS)
    ours = {"created_at": 1.0, "policy_versions": [[5, 2]]}
    both["turns"][0]["metadata"] |= {"policy_versions": [[3, 2]], "tracegrad": ours}
    assert run(target, both).exit_code == 0
    [row] = target.rollouts()
    assert target.rollout_turns(row.rollout_id)[0].policy_versions == ((5, 2),)


BROKEN = [
    (("schema_version",), 2, "schema_version: 2; this tracegrad reads 1: update it"),
    (("turns",), [], "turns: it is empty; write one turn or more"),
    (("turns", 0, "per_token_logps"), [-1.0], "turns[0].per_token_logps: 1 for 2 sampled tokens"),
    (("turns", 0, "loss_mask"), [0, 1], "turns[0].loss_mask: 2 for 2 + 2 tokens; write one each"),
    (("turns", 0, "loss_mask", 0), 1, "turns[0].loss_mask: 1 in the prompt; write 0: it is con"),
    (("turns", 0, "loss_mask", 0), 7, "turns[0].loss_mask[0]: 7; write 0 or 1"),
    (("turns", 1, "node_id"), "", "turns[1].node_id: it is empty; write a text that is not empty"),
    (("turns", 1, "node_id"), "n0", "turns[1].metadata.tracegrad.turn_id: "),
    (("turns", 1, "metadata"), {"reward": "x"}, "turns[1].metadata.reward: 'x'; write a finite"),
    (("turns", 1, "metadata"), {"tracegrad": []}, "turns[1].metadata.tracegrad: write an object"),
    (
        ("turns", 1, "metadata"),
        {"policy_versions": [[3, 1]]},
        "turns[1].metadata.policy_versions: they cover 1 of 2 sampled tokens; cover all",
    ),
    (
        ("turns", 1, "metadata"),
        {"policy_versions": [["x", 2]]},
        "turns[1].metadata.policy_versions[0][0]: it is a text; write ",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), BROKEN, ids=[m[:40] for *_, m in BROKEN])
def test_bad_traces_are_named(
    target: Store, path: tuple[Any, ...], value: Any, message: str
) -> None:
    changed = copy.deepcopy(OPENENVS)
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    done = run(target, changed)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"tracegrad: -:1: {message}"), done.stderr
    assert target.rollouts() == []
