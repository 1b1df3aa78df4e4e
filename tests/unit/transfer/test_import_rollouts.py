"""`tracegrad import`, run as a user runs it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner, Result

from support.transfer.random_stores import NewStore, everything
from support.transfer.template_store import TOOLS, fill
from tracegrad.cli.app import app
from tracegrad.events import Json, RolloutStarted
from tracegrad.store import Ledger, PolicyVersion, StepRecord, Store
from tracegrad.transfer import parquet, parquet_columns
from tracegrad.transfer.export_rollouts import RolloutExport
from tracegrad.transfer.jsonl import line_of
from tracegrad_integrations.exports import trl


def run(store: Store, *arguments: str, text: bytes | None = None) -> Result:
    url = f"sqlite:///{store.database.describe()}"
    return CliRunner().invoke(app, ["import", *arguments], env={"TRACEGRAD_STORE": url}, input=text)


def done(store: Store, *arguments: str, text: bytes | None = None) -> str:
    result = run(store, *arguments, text=text)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def target(new_store: NewStore) -> Store:
    return new_store("sqlite")


@pytest.fixture
def objects(store: Store) -> list[Json]:
    """A whole export: a version, a step, ten rollouts."""
    fill(store)
    store.record_version(PolicyVersion(4, 3, "serving", 5.0))
    turns = [turn.turn_id for turn in store.rollout_turns("d1")]
    Ledger(store).commit_step(
        StepRecord(step=3, version=4), trained=turns[:2], skipped={turns[2]: "stale"},
        rollouts=["d1"],
    )  # fmt: skip
    return [json.loads(line_of(row)) for row in RolloutExport(store=store).rollouts()]


def written(folder: Path, rows: list[Any], name: str = "copy.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_second_import_says_that_nothing_is_new(
    store: Store, target: Store, objects: list[Json], tmp_path: Path
) -> None:
    path = written(tmp_path, objects)
    assert done(target, path) == (
        "10 rollouts: 10 new, 13 new turns, 8 new rewards, 1 new step, 1 new version\n"
    )
    assert everything(target) == everything(store)
    assert done(target, path) == "10 rollouts: 0 new\n"
    assert done(target, path, path) == "20 rollouts: 0 new\n"
    counts = json.loads(done(target, path, "--json"))
    assert (counts["rollouts"], counts["known"], counts["rejected"]) == (0, 10, {})


def test_the_same_file_twice_at_once(target: Store, objects: list[Json], tmp_path: Path) -> None:
    assert done(target, written(tmp_path, objects * 2)).startswith("20 rollouts: 10 new")


def test_what_came_later_is_added(
    store: Store, target: Store, objects: list[Json], tmp_path: Path
) -> None:
    """A copy of an earlier moment, then one of now."""
    early = copy.deepcopy(objects)
    [d1] = [row for row in early if row.get("rollout_id") == "d1"]
    d1 |= {"turns": d1["turns"][:1], "rewards": [], "outcomes": [], "outcome": None}
    d1 |= {"finished_at": None, "consumed_at": None, "consumed_step": None}
    d1["turns"][0] |= {"trained_step": None, "fate_at": None}
    done(target, written(tmp_path, early))
    assert done(target, written(tmp_path, objects)) == (
        "10 rollouts: 0 new, 2 new turns, 1 new reward\n"
    )
    assert everything(target) == everything(store)


def test_standard_input(target: Store, objects: list[Json]) -> None:
    text = b"".join(map(line_of, objects))
    assert done(target, "-", text=text).startswith("10 rollouts: 10 new")


def test_a_new_store_is_made(objects: list[Json], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'new' / 'store.db'}"
    result = CliRunner().invoke(app, ["import", written(tmp_path, objects), "--store", url])
    assert result.exit_code == 0, result.output
    with Store.open(url, create=False) as made:
        assert len(made.rollouts()) == 10


def change(*path: str | int, to: Any) -> Callable[[Json], None]:
    def make(row: Json) -> None:
        place: Any = row
        for key in path[:-1]:
            place = place[key]
        if to is ...:
            del place[path[-1]]
        else:
            place[path[-1]] = to

    return make


BROKEN = [
    (change("rollout_id", to=""), "rollout_id: it is empty; write a text"),
    (change("rollout_id", to=...), "rollout_id: it is missing"),
    (change("tracegrad", to=2), "tracegrad: format 2; this tracegrad reads 1: update it"),
    (change("tracegrad", to=...), 'tracegrad: it is missing; import what `export --rollouts`'),
    (change("kind", to="turn"), "kind: 'turn'; write one of rollout, step, version, span"),
    (change("colour", to="red"), "colour: this format has no such field; leave it out"),
    (change("x - at `$.q`", to=1), "x - at `$.q`: this format has no such field; leave it out"),
    (change("tags - at `$.turns[0]`", to=1), "tags - at `$.turns[0]`: this format has no such"),
    (change("outcome", to="x - at `$.q`"), "outcome: 'x - at `$.q`'; write one of"),
    (change("outcome", to="good"), "outcome: 'good'; write one of completed, agent_error"),
    (change("finished_at", to=None), "finished_at: it goes with outcome; write both or neither"),
    (change("opened_at", to="now"), "opened_at: it is a text; write a time in seconds"),
    (change("opened_at", to=1.7e12), "opened_at: 1700000000000.0; write a time in seconds since"),
    (change("opened_at", to=-1e12), "opened_at: -1000000000000.0; write a time in seconds since"),
    (change("turns", 0, "created_at", to=1.7e12), "turns[0].created_at: 1700000000000.0; write a"),
    (change("rewards", 0, "created_at", to=1.7e12), "rewards[0].created_at: 1700000000000.0; wr"),
    (change("tags", to={"a": 1}), "tags.a: 1 is a number; write a text"),
    (change("turns", 0, "completion_logprobs", to=[-1.0]), "turns[0].completion_logprobs: 1 for "),
    (change("turns", 0, "new_token_ids", 1, to=-1), "turns[0].new_token_ids[1]: -1; write a token"),
    (change("turns", 0, "new_token_ids", 1, to=1.5), "turns[0].new_token_ids[1]: 1.5; write a"),
    (change("turns", 0, "policy_versions", to=[[0, 1]]), "turns[0].policy_versions: they cover 1 "),
    (change("turns", 0, "policy_versions", 0, to=[0]), "turns[0].policy_versions[0]: [0]; write ["),
    (change("turns", 1, "parent_turn_id", to="x"), "turns[1].parent_turn_id: turn 'x' is not be"),
    (change("turns", 1, "turn_id", to="d1.0"), "turns[1].turn_id: 'd1.0' is there twice"),
    (change("turns", 1, "skip_reason", to="x"), "turns[1].skip_reason: the turn was trained; wr"),
    (change("turns", 1, "fate_at", to=None), "turns[1].fate_at: it is missing; write when"),
    (change("turns", 2, "advantage", to=1.0), "turns[2].advantage: the turn was not trained; lea"),
    (change("turns", 1, "advantage", to="1"), "turns[1].advantage: it is a text; write a"),
    (change("turns", 1, "trained_step", to=9), "trained_step: step 9 was not read before it; imp"),
    (change("turns", 1, "request", to=[]), "turns[1].request: it is a list; write an object"),
    (change("rewards", 0, "value", to="1"), "rewards[0].value: it is a text; write a finite"),
    (change("rewards", to={}), "rewards: it is an object; write a list"),
    (change("rewards", 0, "value", to=1e7), "rewards[0].value: 10000000.0; write a finite number"),
    (change("outcomes", 0, to=[]), "outcomes[0]: it is a list; write an object"),
    (change("opened_at", to=10**400), "opened_at: 1000000000"),
    (change("consumed_step", to=2**63), "consumed_step: 9223372036854775808; write a whole number"),
    (change("turns", 0, "policy_versions", 0, 0, to=2**63), "turns[0].policy_versions[0][0]: 9223"),
    (change("turns", 0, "\ud800", to=1), "object: '\\ud800' holds half a surrogate pair; write"),
]  # fmt: skip


@pytest.mark.parametrize(("breaks", "message"), BROKEN, ids=[message[:30] for _, message in BROKEN])
def test_a_broken_object_is_named_and_stores_nothing(
    target: Store, objects: list[Json], tmp_path: Path, breaks: Callable[[Json], None], message: str
) -> None:
    [place] = [n for n, row in enumerate(objects) if row.get("rollout_id") == "d1"]
    breaks(objects[place])
    path = written(tmp_path, objects)
    result = run(target, path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"tracegrad: {path}:{place + 1}: {message}")
    assert result.stderr.count("\n") == 1
    before = [row["rollout_id"] for row in objects[:place] if row["kind"] == "rollout"]
    assert sorted(row.rollout_id for row in target.rollouts()) == before

    lines = done(target, path, "--skip-bad").splitlines()
    assert lines[0].startswith("9 rollouts: 1 new")
    assert lines[1].startswith("left out: ")
    assert lines[1].endswith(" (1)")
    assert "d1" not in {row.rollout_id for row in target.rollouts()}


def test_lines_that_are_no_json_are_named(target: Store, objects: list[Json]) -> None:
    lines = [*map(line_of, objects)]
    text = b"".join([*lines[:4], b'{"tracegrad": \n', b"\n", *lines[4:], b"[1]\n"])
    result = run(target, "-", text=text)
    assert result.exit_code == 1
    assert result.stderr.startswith("tracegrad: -:5: line: it is no JSON")
    assert done(target, "-", "--skip-bad", text=text).splitlines() == [
        "10 rollouts: 8 new, 11 new turns, 6 new rewards",
        "left out: line (1), object (1)",
    ]


def test_a_row_of_parquet_is_named(
    store: Store, target: Store, objects: list[Json], tmp_path: Path
) -> None:
    assert len(objects) == 12
    path = tmp_path / "copy.parquet"
    with path.open("wb") as file:
        parquet.write(file, RolloutExport(store=store).rollouts(), parquet_columns.ROLLOUT)
    table = pyarrow.parquet.read_table(path)
    rows_there = table.to_pylist()
    rows_there[4]["turns"][0]["sampling"] = "{"
    rows_there[5]["turns"][0]["completion_logprobs"] = []
    rows_there[6]["rewards"] = [None]
    broken = pyarrow.Table.from_pylist(rows_there, schema=table.schema)
    pyarrow.parquet.write_table(broken, path)
    error = run(target, str(path)).stderr
    assert error.startswith(f"tracegrad: {path}, row 5: turns[0].sampling: it is no JSON")
    assert done(target, str(path), "--skip-bad").splitlines()[1] == (
        "left out: rewards[] (1), turns[].completion_logprobs (1), turns[].sampling (1)"
    )


def test_rows_of_turns_are_no_copy(target: Store, store: Store, objects: list[Json]) -> None:
    text = b"".join(map(line_of, RolloutExport(store=store).turns()))
    error = run(target, "-", text=text).stderr
    assert "-:1: tracegrad: this is a turn of `export --turns`, which is no whole copy" in error


def test_what_contradicts_the_store_is_refused(
    target: Store, objects: list[Json], tmp_path: Path
) -> None:
    done(target, written(tmp_path, objects))
    [d1] = [row for row in objects if row.get("rollout_id") == "d1"]
    [a1] = [row for row in objects if row.get("rollout_id") == "a1"]
    a1["turns"][0]["completion_token_ids"][0] += 1
    d1["task_id"] = "another"
    d1["turns"] = []
    lines = done(target, written(tmp_path, objects), "--skip-bad").splitlines()
    assert lines == ["8 rollouts: 0 new", "left out: rollout_id (1), turn_id (1)"]
    assert (
        "the store has another turn a1.0 (of rollout a1)"
        in run(target, written(tmp_path, [a1])).stderr
    )


def test_steps_and_versions_of_another_training_run_are_refused(
    target: Store, objects: list[Json], tmp_path: Path
) -> None:
    Ledger(target).commit_step(StepRecord(step=3, version=4), trained=[], skipped={}, rollouts=[])
    target.record_version(PolicyVersion(4, 3, "failed", 6.0))
    path = written(tmp_path, objects)
    assert run(target, path).stderr.startswith(
        f"tracegrad: {path}:1: version: the store has another version 4; import it into a store "
        "of its own, or with --untrained"
    )
    lines = done(target, path, "--skip-bad").splitlines()
    assert lines[0].startswith("9 rollouts: 9 new")
    assert lines[1] == "left out: step (1), trained_step (1), version (1)"

    assert done(target, path, "--untrained").startswith("10 rollouts: 1 new")
    counts = target.turn_counts()
    assert counts.trained == 0
    assert counts.skipped == {}
    assert sum(counts.pending.values()) == 13


ASKED = [{"role": "user", "content": "2+2?"}]
TAUGHT = {
    "messages": [*ASKED, {"role": "assistant", "content": "4"}],
    "task_id": "sum",
    "reward": 1,
    "difficulty": "easy",
}


def test_a_conversation_is_a_finished_rollout_without_tokens(target: Store, tmp_path: Path) -> None:
    path = written(tmp_path, [TAUGHT])
    assert done(target, path) == "1 rollout: 1 new, 1 new turn, 1 new reward\n"
    [row] = target.rollouts()
    assert (row.task_id, row.outcome, row.reward) == ("sum", "completed", 1.0)
    [turn] = target.rollout_turns(row.rollout_id)
    assert turn.untrainable == "no_tokens"
    assert turn.request == {"model": "", "messages": ASKED}
    assert turn.response is not None
    assert turn.response["choices"][0]["message"] == {"role": "assistant", "content": "4"}
    assert target.rollout(row.rollout_id).task == {"difficulty": "easy"}

    before = everything(target)
    assert done(target, path) == "1 rollout: 0 new\n"
    assert everything(target) == before


def test_a_reward_that_changed_is_added(target: Store, tmp_path: Path) -> None:
    done(target, written(tmp_path, [TAUGHT]))
    assert done(target, written(tmp_path, [TAUGHT | {"reward": 0}])) == (
        "1 rollout: 0 new, 1 new reward\n"
    )
    [row] = target.rollouts()
    assert row.reward == 0.0


def test_rows_for_another_trainer_come_back_as_conversations(
    store: Store, target: Store, objects: list[Json]
) -> None:
    """With their tools, which are texts there."""
    text = b"".join(map(line_of, RolloutExport(store=store).layout(trl.SFT)))
    assert done(target, "-", text=text).startswith("9 rollouts: 9 new")
    requests = [
        turn.request
        for row in target.rollouts()
        for turn in target.rollout_turns(row.rollout_id)
        if turn.request is not None
    ]
    assert [request["tools"] for request in requests if "tools" in request] == [TOOLS]


def test_conversations_from_parquet(target: Store, tmp_path: Path) -> None:
    """Whose messages have nulls where others have fields."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        TAUGHT,
        {"messages": [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]},
    ]
    path = tmp_path / "taught.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert done(target, str(path)).startswith("2 rollouts: 2 new")
    by_jsonl = done(target, written(tmp_path, [TAUGHT]))
    assert by_jsonl == "1 rollout: 0 new\n"
    replies = [
        turn.response["choices"][0]["message"]
        for row in target.rollouts()
        for turn in target.rollout_turns(row.rollout_id)
        if turn.response is not None
    ]
    assert {"role": "assistant", "tool_calls": [call]} in replies


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": ASKED}, "messages: 1; write what was asked and the reply"),
        ({"messages": [*ASKED, *ASKED]}, "messages[1].role: 'user'; the last message is"),
        ({"messages": [*ASKED, {"content": "4"}]}, "messages[1].role: it is missing or null"),
        ({"messages": [*ASKED, "4"]}, "messages[1]: it is a text; write an object"),
        ({"messages": "2+2?"}, "messages: it is a text; write a list"),
        ({"reward": "good"}, "reward: it is a text; write a finite number from -1,000,000"),
        ({"tools": {}}, "tools: write a list, or a JSON text with one"),
        ({"tools": "{"}, "tools: it is a text and no JSON; write a list"),
    ],
)
def test_broken_conversations_are_named(
    target: Store, tmp_path: Path, changes: Json, message: str
) -> None:
    path = written(tmp_path, [TAUGHT | changes])
    result = run(target, path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"tracegrad: {path}:1: {message}")
    assert target.rollouts() == []


def test_files_that_cannot_be_read_are_one_line(target: Store, tmp_path: Path) -> None:
    missing = str(tmp_path / "no.jsonl")
    assert run(target, missing).stderr == f"tracegrad: {missing}: No such file or directory\n"
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and then nothing of the kind")
    result = run(target, str(broken))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"tracegrad: {broken}: it is no Parquet file")


def test_a_rollout_that_was_only_opened_here_takes_what_is_known_elsewhere(
    target: Store, objects: list[Json], tmp_path: Path
) -> None:
    target.append([RolloutStarted(rollout_id="a1", task_id="sum", opened_at=1000.0)])
    assert done(target, written(tmp_path, objects)).startswith("10 rollouts: 9 new")
    [row] = [row for row in target.rollouts() if row.rollout_id == "a1"]
    assert (row.outcome, row.reward, row.turns) == ("completed", 1.0, 1)
