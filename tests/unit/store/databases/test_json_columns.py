"""What JSON columns give back is what Python's own reader makes of their text."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tracegrad.events import RolloutStarted
from tracegrad.store import Store
from tracegrad.store.databases.json_columns import json_text, json_value
from tracegrad.store.read.task_pages import rollout_input

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
@example(2**63)
@example([-(2**63) - 1, {"n": 2**64}])
@example({"long": "0" * 40, "small": 1.2345678901234567e-20})
@example("\ud800")
def test_a_value_is_read_as_pythons_reader_reads_it(value: object) -> None:
    text = json_text(value)
    wanted = json.loads(text)
    for read in (json_value(text), json_value(text.encode())):
        assert read == wanted
        assert repr(read) == repr(wanted), "an integer is no float"


@pytest.mark.parametrize("text", ["NaN", "[Infinity, 1]", "1e999", '"\\ud800"', " 7 "])
def test_what_only_python_reads_is_read(text: str) -> None:
    found, wanted = json_value(text), json.loads(text)
    assert found == wanted or math.isnan(found)


def test_text_that_is_no_json_is_an_error() -> None:
    with pytest.raises(json.JSONDecodeError):
        json_value("{")


@pytest.mark.parametrize("given", [42, -1.5, True, "12", "", [2**70], {"n": None}])
def test_a_column_gives_back_what_was_put_in(store: Store, given: Any) -> None:
    """SQLite makes numbers of texts that look like one."""
    store.append([RolloutStarted(rollout_id="r", task=given)])
    with store.reading() as connection:
        found = rollout_input(connection, "r")
    assert (found, type(found)) == (given, type(given))
