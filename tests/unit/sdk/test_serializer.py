"""Any value becomes JSON, in bounded work, and says what was left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.sdk.hostile_values import VALUES
from tracegrad import task_ids
from tracegrad.serializer import (
    Serializer,
    SerializerLimits,
    bounded_repr,
    bounded_str,
    encode,
    to_json,
)

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=20)
# Lone surrogates too.
texts = st.text(st.characters(exclude_categories=()), max_size=20)
trees = st.recursive(
    leaves | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts | st.integers(), inner),
    max_leaves=50,
)


@given(trees)
def test_every_value_is_one_line_of_json(value: object) -> None:
    line = encode(to_json(value))
    assert b"\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(name))


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
        max_leaves=20,
    )
)
def test_what_json_can_say_stays_as_it_is(value: object) -> None:
    walk = Serializer(SerializerLimits(depth=100))
    assert json.loads(encode(walk.serialize(value))) == value
    assert not walk.truncated


@pytest.mark.parametrize("name", VALUES)
def test_a_hostile_value_is_small_json(name: str) -> None:
    line = encode(to_json({"before": 1, "held": VALUES[name](), "after": "kept"}))
    found = json.loads(line)
    assert (found["before"], found["after"]) == (1, "kept"), "its neighbours have their part"
    assert len(line) < 2_000_000
    assert len(bounded_str(VALUES[name]())) < 100_100
    assert len(bounded_repr(VALUES[name]())) < 300


class Counted(Sequence[Any]):
    """Tells how often it was asked."""

    def __init__(self, item: object) -> None:
        self.item = item
        self.asked = 0

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: Any) -> Any:
        self.asked += 1
        return self.item


def test_a_bounded_number_of_values_is_visited() -> None:
    """By count: no clock, and nothing that grows with the value."""
    flat, nested = Counted(1), Counted(None)
    nested.item = nested
    limits = SerializerLimits()
    to_json(flat)
    assert flat.asked <= limits.items
    to_json(nested)
    assert nested.asked <= limits.values + 100 * limits.depth


def test_what_was_left_out_says_so_in_its_place() -> None:
    assert to_json(10**5_000).startswith("0x")
    assert to_json(2**64) == str(2**64)
    assert to_json(-(10**1_000_000)).endswith(f"… ({(10**1_000_000).bit_length()} bits)")
    assert to_json(b"\x00" * 1_000_000).endswith(" more bytes)")
    assert to_json("x" * 100_001).endswith("… (1 more characters)")
    assert to_json(list(range(1_500)))[-2:] == [499, "… (1000 more)"]
    assert to_json({i: i for i in range(1_500)})["…"] == "1000 more"
    assert to_json(set(range(1_500))) == ["… (1500 more)"]


@dataclass
class Point:
    x: int
    key: str = field(default="secret", repr=False)


class Person(pydantic.BaseModel):
    name: str
    password: pydantic.SecretStr


def test_objects_with_fields_are_their_fields() -> None:
    assert to_json(Point(1)) == {"__class__": "Point", "x": 1}
    person = to_json(Person(name="A", password=pydantic.SecretStr("secret")))
    assert person["name"] == "A"
    assert "secret" not in json.dumps(person)


def solve(a: object) -> None: ...


def test_a_task_is_its_arguments_and_no_clock_decides() -> None:
    ids = {
        task_ids.task_and_input(solve, {"a": value})[0]
        for value in (1, 1.5, "1", [1], {"k": 1}, Point(1), Point(2), 10**5_000, 10**5_000 + 1)
    }
    assert len(ids) == 9
    for name in VALUES:
        if name not in ("keys",):  # its keys have addresses in no text
            first, second = (task_ids.task_and_input(solve, {"a": VALUES[name]()}) for _ in "12")
            assert first[0] == second[0], name


def test_a_class_whose_repr_fails_is_asked_once() -> None:
    class Broken:
        asked = 0

        def __repr__(self) -> str:
            Broken.asked += 1
            raise RuntimeError

    assert (
        to_json([Broken() for _ in range(50)])
        == ["<test_a_class_whose_repr_fails_is_asked_once.<locals>.Broken>"] * 50
    )
    assert Broken.asked == 1


def test_an_id_that_is_too_long_becomes_its_beginning_and_a_digest() -> None:
    assert task_ids.bounded_task_id("t1") == "t1"
    one, other = (
        task_ids.bounded_task_id("ü" * 5_000 + "1"),
        task_ids.bounded_task_id("ü" * 5_000 + "2"),
    )
    assert one != other
    assert one.startswith("ü" * 100)
    assert len(one.encode()) < 512


@given(st.dictionaries(st.text(max_size=20), trees, max_size=8))
@example({"a": ["x"] * 600})
@example({"a": "x" * 150_000})
@example({"a": [[1] * 300], "b": [2] * 300, "c": 3, "d": 4, "e": 5, "f": 6, "g": 7})
def test_what_is_shown_of_arguments_is_what_its_own_limits_leave(arguments: dict[str, Any]) -> None:
    """Also where one walk serves both the task's id and what is shown."""
    walk = Serializer()
    shown = walk.serialize(arguments)
    _, plain = task_ids.task_and_input(len, arguments)
    assert json.dumps(plain.value) == json.dumps(shown)  # as text: nan equals nothing
    assert plain.truncated == walk.truncated
