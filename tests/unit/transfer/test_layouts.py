"""What is common to all layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from sqlalchemy import update

from support.transfer.template_store import CHAT, answer, fill, turn, user
from tracegrad.events import RolloutStarted, Turn
from tracegrad.store import RolloutFilter, Store
from tracegrad.store.models import Rollouts
from tracegrad.transfer import ExportLayout, find_layout, layout_names, parquet
from tracegrad.transfer.export_rollouts import RolloutExport
from tracegrad_integrations.exports import slime, trl, verl
from tracegrad_integrations.interchange import atif_export, training_trace

ALL = [
    value
    for module in (trl, verl, slime, atif_export, training_trace)
    for value in vars(module).values()
    if isinstance(value, ExportLayout)
]


def rows(store: Store, layout: ExportLayout) -> tuple[list[dict[str, object]], dict[str, int]]:
    export = RolloutExport(store=store)
    return list(export.layout(layout)), export.counts.left_out


def test_every_layout_is_found_by_its_name() -> None:
    assert layout_names() == sorted(layout.name for layout in ALL)
    for layout in ALL:
        assert find_layout(layout.name) is layout


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_parquet_and_jsonl_hold_the_same(
    store: Store, tmp_path: Path, layout: ExportLayout
) -> None:
    fill(store)
    made, _ = rows(store, layout)
    assert made
    with (tmp_path / "rows.parquet").open("wb") as file:
        parquet.write(file, iter(made), layout.columns)
    table = pyarrow.parquet.read_table(tmp_path / "rows.parquet")
    assert table.column_names == list(layout.columns)
    read = [parsed(row, layout) for row in table.to_pylist()]
    assert [bare(row) for row in read] == [bare(row) for row in made]


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_held_out_rollouts_are_no_rows_for_trainers_unless_they_are_asked_for(
    store: Store, layout: ExportLayout
) -> None:
    fill(store)
    without, _ = rows(store, layout)
    with store.appending() as connection:
        connection.execute(update(Rollouts).values(held_out=True))
    assert rows(store, layout) == ([], {"rollouts: held_out": len(store.rollouts())})
    asked = RolloutExport(store=store, wanted=RolloutFilter(held_out=True))
    assert [unmarked(row) for row in asked.layout(layout)] == without


def unmarked(row: dict[str, Any]) -> dict[str, Any]:
    """Copies in formats of others say it of themselves."""
    row.get("extra", {}).get("tracegrad", {}).pop("held_out", None)
    for each in row.get("turns", ()):
        each["metadata"]["tracegrad"].get("rollout", {}).pop("held_out", None)
    return row


def parsed(row: dict[str, Any], layout: ExportLayout) -> dict[str, Any]:
    texts = {name for name, column in layout.columns.items() if column == "json"}
    return {
        name: json.loads(value) if name in texts and value is not None else value
        for name, value in row.items()
    }


def bare(value: object) -> object:
    """Without the nulls of columns."""
    if isinstance(value, dict):
        return {key: bare(item) for key, item in value.items() if item is not None}
    return [bare(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_nothing_makes_no_rows_and_a_file_with_columns(
    store: Store, tmp_path: Path, layout: ExportLayout
) -> None:
    with (tmp_path / "rows.parquet").open("wb") as file:
        export = RolloutExport(store=store, wanted=RolloutFilter(task="nothing"))
        parquet.write(file, export.layout(layout), layout.columns)
    table = pyarrow.parquet.read_table(tmp_path / "rows.parquet")
    assert (table.num_rows, table.column_names) == (0, list(layout.columns))


def captured(store: Store, *turns: Turn) -> None:
    store.append([RolloutStarted(rollout_id="r", task_id="t", opened_at=1.0), *turns])


def test_turns_without_text_are_counted(store: Store) -> None:
    complete = turn("a", "r", CHAT, answer("Hi"))
    captured(store, turn("b", "r", CHAT, answer("Ho"), request=None), complete)
    found, left_out = rows(store, trl.PROMPT_COMPLETION)
    assert [row["completion"] for row in found] == [[answer("Hi")]]
    assert left_out == {"turns: no_text": 1}


def test_media_are_counted_and_parts_of_text_are_joined(store: Store) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    captured(
        store,
        turn("a", "r", [user("Hello")], answer("Hi"), request={"messages": [user(parts)]}),  # type: ignore[arg-type]
        turn("b", "r", [user("Hello")], answer("Hi"), request={"messages": [user(image)]}),  # type: ignore[arg-type]
    )
    found, left_out = rows(store, trl.PROMPT_COMPLETION)
    assert [row["prompt"] for row in found] == [[user("Hello\nthere")]]
    assert left_out == {"turns: media": 1}


def test_an_imported_conversation_is_learned_whole(store: Store) -> None:
    """All its replies are the teacher's; one that an agent brought along is not."""
    asked = [user("1"), answer("one"), user("2")]
    teacher = turn("a", "r", asked, answer("two"), sampling={"source": "imported_messages"})
    captured(store, teacher)
    found, left_out = rows(store, trl.SFT)
    assert [row["messages"] for row in found] == [[*asked, answer("two")]]
    assert left_out == {}


def test_reasoning_stays_with_the_reply_that_had_it(store: Store) -> None:
    thought = answer("Hi") | {"reasoning": "greet"}
    first = turn("a", "r", CHAT, answer("Hi"), response={"choices": [{"message": thought}]})
    captured(store, first, turn("b", "r", [*CHAT, answer("Hi"), user("Bye")], answer("Bye")))
    [found], _ = rows(store, trl.SFT)
    messages = found["messages"]
    assert messages == [
        user("Hello"), answer("Hi") | {"reasoning_content": "greet"}, user("Bye"), answer("Bye"),
    ]  # fmt: skip
