"""What JSON columns give back is what Python's own reader makes of their text."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tracegrad.store.databases.json_columns import json_text, json_value

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
