"""The columns of each Parquet file, of the schema's fields, in words of `layouts.Column`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import inspect

from tracegrad.transfer.layouts import Column
from tracegrad.transfer.schema import FlatTurnObject, RolloutObject
from tracegrad.transfer.validation import without_null

_WORDS: Mapping[type[inspect.Type], str] = {
    inspect.StrType: "text",
    inspect.EnumType: "text",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.BoolType: "flag",
    inspect.BytesType: "file",
    # Their fields differ from row to row: a JSON text in a column.
    inspect.DictType: "json",
    inspect.AnyType: "json",
}
_LIST_WORDS = {"integer": "ids", "number": "logprobs", "pairs": "pairs"}


def _columns(struct: inspect.Type) -> Mapping[str, Column]:
    assert isinstance(struct, inspect.StructType)
    return {field.name: _column(without_null(field.type)) for field in struct.fields}


def _column(kind: inspect.Type) -> Column:
    if isinstance(kind, inspect.StructType):
        return _columns(kind)
    if isinstance(kind, inspect.TupleType):
        return "pairs"
    if isinstance(kind, inspect.ListType):
        item = _column(without_null(kind.item_type))
        return _LIST_WORDS[item] if isinstance(item, str) else {"*": item}
    return _WORDS[type(kind)]


# Of `export --rollouts`. Rows that are no rollout have their fields in `other`.
ROLLOUT = {**_columns(inspect.type_info(RolloutObject)), "other": "json"}
# Of `export --turns`.
TURN = _columns(inspect.type_info(FlatTurnObject))

_CALL: Mapping[str, Column] = {
    "id": "text",
    "type": "text",
    "function": {"name": "text", "arguments": "text"},
}
_MESSAGE: Mapping[str, Column] = {
    "role": "text",
    "content": "text",
    "reasoning_content": "text",
    "tool_calls": {"*": _CALL},
    "tool_call_id": "text",
    "name": "text",
}


def has_messages(columns: Mapping[str, Column]) -> bool:
    return "messages" in columns.values()


def message_fields(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Column]) -> set[str]:
    """Fields of the chat messages that occur. A field that is in a file is in all its messages, as
    null where it was not, and some chat templates distinguish null from nothing."""
    names = [name for name, column in columns.items() if column == "messages"]
    found = {"role", "content"}
    for row in rows:
        for name in names:
            for message in row[name] or ():
                found |= message.keys()
    return found


def with_messages(columns: Mapping[str, Column], fields: set[str]) -> Mapping[str, Column]:
    """The columns, "messages" spelled out."""
    message = {name: column for name, column in _MESSAGE.items() if name in fields}
    assert fields <= _MESSAGE.keys(), f"messages have unknown fields {fields - _MESSAGE.keys()}"
    return {
        name: {"*": message} if column == "messages" else column for name, column in columns.items()
    }
