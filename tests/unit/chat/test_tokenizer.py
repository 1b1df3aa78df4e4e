"""Text to tokens and back: what is claimed without encoding is what encoding gives."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from support.chat.tokenizers import KINDS, KNOWN, TAGS, core
from tracegrad.chat.tokenizer import Tokenizer, UnencodableText

PIECES = st.one_of(
    st.sampled_from(TAGS),
    st.sampled_from([" ", "  ", "\n", "\t", "\x1c", "\u2003", "▁", "<|en", "d|>", "|>", "<0x41>"]),
    st.sampled_from(["lamps", " in Oslo", "é", "e\u0301", "中", "🙂", '{"a": 1}', "."]),
    st.text(max_size=6),
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_a_text_is_read_as_its_own_tokens_say(kind: str, text: str) -> None:
    tokenizer = Tokenizer(core(kind))
    assert tokenizer.roundtrip(text) == tokenizer.decode(tokenizer.encode(text))


@pytest.mark.parametrize("kind", KNOWN)
def test_the_common_kinds_are_read_without_encoding(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(core(kind))
    monkeypatch.setattr(tokenizer, "encode", None)
    text = "<s><|user|>How many lamps?<|end|><|assistant|>17.<|end|>"
    assert tokenizer.roundtrip(text) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(left=TEXTS, stop=st.sampled_from(TAGS), right=TEXTS)
def test_the_end_of_a_text_is_encoded_as_in_the_whole(
    kind: str, left: str, stop: str, right: str
) -> None:
    tokenizer = Tokenizer(core(kind))
    whole = left + stop + right
    ids = tokenizer.encode(whole)
    read = tokenizer.roundtrip(whole)
    for at in (i for i in range(len(read)) if read.startswith(stop, i)):
        tail = tokenizer.encode_tail(read[at:], whole)
        if tail is not None:
            assert ids[len(ids) - len(tail) :] == tail
            assert tokenizer.added_token(tail[0]) is not None
            assert tokenizer.decode(tail) == read[at:]


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_chat_prompt_is_always_encoded(kind: str) -> None:
    tokenizer = Tokenizer(core(kind))
    whole = "<s><|user|>How many?<|end|><|assistant|>17 lamps<|end|><|user|> And in Rome? <|end|>"
    read = tokenizer.roundtrip(whole)
    tail = read[read.index("<|end|>", read.index("17")) :]
    ids = tokenizer.encode_tail(tail, whole)
    assert ids is not None
    assert ids == tokenizer.encode(whole)[-len(ids) :]


def test_a_token_that_another_can_swallow_is_looked_for_in_the_whole_text() -> None:
    plain = core("bytes").from_str(core("bytes").to_str())
    plain.add_special_tokens([AddedToken("x<|end|>")])
    tokenizer = Tokenizer(plain)
    whole = "fox<|end|><|user|>"
    assert tokenizer.encode_tail("<|end|><|user|>", whole) is None
    assert tokenizer.encode_tail("<|end|><|user|>", "fo<|end|><|user|>") is not None


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (AddedToken("x<|end|>"), "fox<|end|> 17"),
        (AddedToken("<|end|> 1"), "<|end|> 17"),
        (AddedToken("|> ", single_word=True), "<|end|> 17"),
    ],
)
def test_a_stripping_token_that_another_can_take_the_place_of(more: AddedToken, text: str) -> None:
    stripping = core("right_stripping").from_str(core("right_stripping").to_str())
    stripping.add_special_tokens([more])
    tokenizer = Tokenizer(stripping)
    assert tokenizer.roundtrip(text) == tokenizer.decode(tokenizer.encode(text))


def test_a_token_that_is_one_as_a_word_only_depends_on_what_precedes_it() -> None:
    wordy = core("bytes").from_str(core("bytes").to_str())
    wordy.add_special_tokens([AddedToken("<w>", single_word=True)])
    tokenizer = Tokenizer(wordy)
    assert tokenizer.encode_tail("<w> lamps", "b<w> lamps") is None
    assert tokenizer.encode_tail("<w> lamps", "b <w> lamps") == tokenizer.encode("<w> lamps")


def test_text_that_is_spelled_like_a_token_but_is_none_is_not_counted_as_one() -> None:
    tokenizer = Tokenizer(core("normalized"))  # <tool_call> is one as a word only
    whole = "<tool_call> a <tool_call> b<tool_call>c"
    assert tokenizer.encode_tail("<tool_call> b<tool_call>c", whole) is None
    assert tokenizer.encode_tail("<tool_call> a <tool_call>", "<tool_call> a <tool_call>")


def test_the_token_that_is_found_first_is_not_always_the_longest() -> None:
    plain = core("bytes").from_str(core("bytes").to_str())
    plain.add_tokens([AddedToken("<|end|>17", normalized=True)])
    tokenizer = Tokenizer(plain)
    whole = "fox<|end|>17 lamps"
    ids = tokenizer.encode_tail("<|end|>17 lamps", whole)
    assert ids is not None
    assert tokenizer.encode(whole)[-len(ids) :] == ids
    assert tokenizer.added_token(ids[0]) == "<|end|>"


def test_a_text_that_does_not_begin_with_an_added_token_has_no_tail() -> None:
    tokenizer = Tokenizer(core("bytes"))
    assert tokenizer.encode_tail("17<|end|>", "17<|end|>") is None


def test_ids_that_stand_for_nothing_leave_nothing() -> None:
    tokenizer = Tokenizer(core("bytes"))
    ids = tokenizer.encode("17")
    assert tokenizer.decode(ids + array("i", [99_999])) == "17"


def test_half_a_character_is_no_text() -> None:
    with pytest.raises(UnencodableText, match="lone surrogate"):
        Tokenizer(core("bytes")).encode("a\ud800")


def test_nothing_is_added_cut_or_padded() -> None:
    padded = core("bytes").from_str(core("bytes").to_str())
    padded.enable_padding(length=50)
    padded.enable_truncation(3)
    tokenizer = Tokenizer(padded)
    assert tokenizer.decode(tokenizer.encode("<s>How many lamps?")) == "<s>How many lamps?"


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_is_decoded_alike_when_it_comes_again(kind: str) -> None:
    tokenizer = Tokenizer(core(kind))
    ids = tokenizer.encode("what is asked <|im_end|> and what is answered " * 200)
    assert len(ids) * ids.itemsize > 1024
    first, plain = tokenizer.decode(ids), tokenizer.decode(ids, skip_special=True)
    assert [tokenizer.decode(ids[:]), tokenizer.decode(list(ids))] == [first, first]
    assert tokenizer.decode(ids, skip_special=True) == plain
    assert tokenizer.decode(ids[:-1]) != first
