"""The examples of docs/transfer.md are what the code makes and takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.transfer.template_store import fill
from tracegrad.store import Store
from tracegrad.transfer import ExportLayout
from tracegrad.transfer.chat_conversations import ImportedConversation
from tracegrad.transfer.deserialize import read_object
from tracegrad.transfer.export_rollouts import RolloutExport
from tracegrad_integrations.exports import slime, trl, verl
from tracegrad_integrations.interchange import atif_export, training_trace

PAGE = (Path(__file__).parents[3] / "docs" / "transfer.md").read_text()


def examples() -> list[dict[str, object]]:
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)\n```", PAGE, re.DOTALL)]


MODULES = (trl, verl, slime, atif_export, training_trace)
LAYOUTS = [v for m in MODULES for v in vars(m).values() if isinstance(v, ExportLayout)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_has_an_example_with_its_columns(store: Store, layout: ExportLayout) -> None:
    name = layout.name
    assert f"| `{name}` |" in PAGE
    fill(store)
    row, *others = RolloutExport(store=store).layout(layout)
    if name == "slime-samples":  # shown as it is in slime's own file
        row = {**row, "index": 0, "group_index": 0}
        del row["group_id"]
    if name == "verl-sft":  # shown in the text
        assert row.keys() == {"messages"}
        return
    shown = [fields_of(example) for example in examples()]
    if name == "atif":  # fields without a value are left out
        assert any(fields_of(each) in shown for each in others)
        return
    assert fields_of(row) in shown


def fields_of(row: dict[str, object]) -> dict[str, object]:
    """Their names, and those of objects in them."""
    return {key: set(value) if isinstance(value, dict) else None for key, value in row.items()}


def test_the_example_of_a_conversation_can_be_read() -> None:
    [example] = [e for e in examples() if "task_id" in e and "messages" in e]
    assert isinstance(read_object(example), ImportedConversation)


def test_every_field_of_the_format_is_on_the_page(store: Store) -> None:
    fill(store)
    copies = {row["rollout_id"]: row for row in RolloutExport(store=store).rollouts()}
    copy = copies["c1"]
    fields = {*copy, *copy["turns"][0], *copy["rewards"][0], *copy["outcomes"][0]}
    fields |= next(RolloutExport(store=store).turns()).keys()
    missing = [field for field in fields if not re.search(rf"\b{field}\b", PAGE)]
    assert missing == []
