"""Responses API: the text of a custom tool, read from JSON while it comes."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad.proxy.dialects.openai_responses.tools import (
    CustomInputReader,
    custom_input_as_arguments,
    custom_input_as_text,
)


def in_pieces(arguments: str, cuts: list[int]) -> tuple[str, str]:
    """What is sent while the pieces come, and what at the end."""
    reader = CustomInputReader()
    places = sorted({cut % (len(arguments) + 1) for cut in cuts})
    edges = [0, *places, len(arguments)]
    early = "".join(reader.feed(arguments[start:end]) for start, end in pairwise(edges))
    return early, reader.finish()


texts = st.text(st.characters(codec="utf-8"))
cuts = st.lists(st.integers(0, 500))


@given(texts, cuts, st.booleans(), st.sampled_from(["", " ", "\n  "]))
def test_a_text_comes_out_as_it_went_in(
    text: str, places: list[int], ascii_only: bool, space: str
) -> None:
    encoded = json.dumps(text, ensure_ascii=ascii_only)
    arguments = f'{space}{{{space}"input"{space}:{space}{encoded}{space}}}{space}'
    early, rest = in_pieces(arguments, places)
    assert early == text
    assert rest == ""
    assert custom_input_as_text(arguments) == text


@given(texts)
def test_a_text_sent_back_is_the_same_text(text: str) -> None:
    assert custom_input_as_text(custom_input_as_arguments(text)) == text
    assert json.loads(custom_input_as_arguments(text)) == {"input": text}


@given(st.text(st.sampled_from('{}":\\ inputud8dc0x,')), cuts)
def test_no_matter_how_arguments_are_cut_the_text_is_the_same(
    arguments: str, places: list[int]
) -> None:
    for whole in (arguments, '{"input":"' + arguments, '{"input":"' + arguments + '"}'):
        assert "".join(in_pieces(whole, places)) == custom_input_as_text(whole)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", ""),
        ("{}", "{}"),
        ("*** Begin Patch", "*** Begin Patch"),
        ('{"patch":"x"}', '{"patch":"x"}'),
        ('["x"]', '["x"]'),
        ('{"input":5}', '{"input":5}'),
        ('{"in put":"x"}', '{"in put":"x"}'),
        ('{"input":"x","why":"y"}', "x"),
        ('{"input":"x","input":"y"}', "x"),
        ('{"input":"cut', "cut"),
        ('{"input":"cut"', "cut"),
        ('{"input":"cut\\', "cut\\"),
        ('{"input":"cut\\u00', "cut\\u00"),
        ('{"input":"a\\qb"}', "a\\qb"),
        ('{"input":"\\ud800x"}', "�x"),
        ('{"input":"line\nbreak"}', "line\nbreak"),
        ('{"input":"print("hi")"}', 'print("hi")"}'),
    ],
)
def test_nothing_that_a_model_writes_is_lost(arguments: str, text: str) -> None:
    assert custom_input_as_text(arguments) == text


def test_text_is_sent_before_its_end_has_come() -> None:
    reader = CustomInputReader()
    assert reader.feed('{"inp') == ""
    assert reader.feed('ut": "*** Be') == "*** Be"
    assert reader.feed("gin\\") == "gin"
    assert reader.feed("n") == "\n"
    assert reader.feed("\\ud83d") == ""
    assert reader.feed("\\ude00") == "😀"
    assert reader.feed('"}') == ""
    assert reader.finish() == ""
