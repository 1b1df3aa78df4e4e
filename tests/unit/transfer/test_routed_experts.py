"""Routed experts in copies: base64 in JSON, bytes in Parquet, nothing where there are none."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from support.trainer.routing_files import experts_of
from support.transfer.files import exported, imported
from support.transfer.random_stores import NewStore, everything
from tracegrad.events import Json, Turn, logprob_array, token_id_array
from tracegrad.store import Store
from tracegrad.transfer import jsonl, parquet, parquet_columns
from tracegrad.transfer.deserialize import read_object
from tracegrad.transfer.export_rollouts import RolloutExport
from tracegrad.transfer.validation import InvalidObject

FILE = experts_of(3)


def a_turn(turn_id: str, file: bytes | None) -> Turn:
    return Turn(
        turn_id=turn_id,
        rollout_id="r",
        dialect="chat",
        model="m",
        prompt_token_ids=token_id_array([1, 2]),
        completion_token_ids=token_id_array([3, 4]),
        completion_logprobs=logprob_array([-1, -2]),
        policy_versions=((0, 2),),
        request={"messages": []},
        routed_experts=file,
        created_at=1.0,
    )


@pytest.fixture
def store(new_store: NewStore) -> Store:
    made = new_store("sqlite")
    made.append([a_turn("with", FILE), a_turn("without", None)])
    return made


def rollout(store: Store, **how: Any) -> Json:
    [row] = RolloutExport(store=store, **how).rollouts()
    return row


@pytest.mark.parametrize("text", [True, False])
def test_a_turn_that_has_some_says_so_with_or_without_text(store: Store, text: bool) -> None:
    have, none = rollout(store, text=text)["turns"]
    assert have["routed_experts"] == b64encode(FILE).decode()
    assert "routed_experts" not in none, "readers of before refuse fields that they do not know"
    assert ("request" in have) == text


def test_parquet_has_their_bytes(store: Store, tmp_path: Path, new_store: NewStore) -> None:
    path = exported(store, tmp_path / "copy.parquet")
    [row] = pyarrow.parquet.read_table(path).to_pylist()
    assert [turn["routed_experts"] for turn in row["turns"]] == [FILE, None]
    target = new_store("sqlite")
    imported(target, path)
    assert everything(target) == everything(store)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_files_of_before_are_read(
    store: Store, tmp_path: Path, new_store: NewStore, ending: str
) -> None:
    row = rollout(store)
    for turn in row["turns"]:
        turn.pop("routed_experts", None)
    before = parquet_columns.ROLLOUT["turns"]
    assert not isinstance(before, str)
    assert not isinstance(before["*"], str)
    fewer = {name: column for name, column in before["*"].items() if name != "routed_experts"}
    path = tmp_path / f"old.{ending}"
    with path.open("wb") as file:
        if ending == "jsonl":
            file.write(jsonl.line_of(row))
        else:
            kept = {**parquet_columns.ROLLOUT, "turns": {"*": fewer}}
            parquet.write(file, [row], kept)
    target = new_store("sqlite")
    assert imported(target, path).added.turns == 2
    assert [turn.routed_experts for turn in target.rollout_turns("r")] == [None, None]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (7, "7 is a number; write the file's bytes as base64"),
        ("%", "it is no base64; write the file's bytes as base64"),
        ("AAAA", r"it is no \.npy file of .*; leave it out"),
        (b64encode(experts_of(4)).decode(), "4 tokens of a turn of 4, .*; leave it out"),
    ],
)
def test_those_that_are_none_are_refused_by_name(store: Store, value: object, why: str) -> None:
    row = rollout(store)
    row["turns"][0]["routed_experts"] = value
    with pytest.raises(InvalidObject, match=rf"turns\[0\]\.routed_experts: {why}"):
        read_object(row)


def test_turns_for_scripts_have_none(store: Store) -> None:
    assert all("routed_experts" not in turn for turn in RolloutExport(store=store).turns())
