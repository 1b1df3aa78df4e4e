"""Damage to what a turn holds is named, turn by turn."""

from __future__ import annotations

import math
from typing import Any

import pytest

from support.store.conversations import conversation
from support.store.doctor_findings import Breaks, found
from support.store.doctor_findings import breaks as breaks
from support.store.events import make_turn
from support.store.maintenance import drop
from tracegrad.events import logprob_array, token_id_array
from tracegrad.store import Store
from tracegrad.store.encoding.blobs import array_content, pack_blobs

pytestmark = pytest.mark.databases("sqlite")  # of rows that were read


def blob(values: Any) -> bytes:
    [found] = pack_blobs([array_content(values)])
    return found


def test_tokens_that_are_not_the_stored_ones(store: Store, breaks: Breaks) -> None:
    turns = conversation()
    store.append(turns)
    breaks("UPDATE turns SET delta = ? WHERE turn_id = 'r.1'", blob(token_id_array([1, 2, 4])))
    first, *after = found(store, "tokens")
    assert first.subject == "turn r.1"
    assert "are not the ones that were stored (rollout r)" in first.message
    assert "prune --rollout r --also-untrained" in first.fix
    assert [f.message for f in after] == [
        "it continues turn r.1, whose tokens are broken (rollout r)",
        "it continues turn r.2, whose tokens are broken (rollout r)",
    ]


def test_tokens_that_cannot_be_unpacked(store: Store, breaks: Breaks) -> None:
    store.append([make_turn("t")])
    breaks("UPDATE turns SET completion = ? WHERE turn_id = 't'", b"\x02garbage")
    [finding] = found(store, "tokens")
    assert finding.subject == "turn t"
    assert "cannot be read" in finding.message


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("prompt_tokens", 9, "3 prompt tokens, and 9 are recorded"),
        ("completion_tokens", 9, "2 sampled tokens, and 9 are recorded"),
        ("logprobs", blob(logprob_array([-1.0])), "1 log-probabilities for 2 sampled tokens"),
        ("logprobs", b"\x02garbage", "its log-probabilities: a stored blob cannot be read"),
    ],
)
def test_lengths_that_do_not_fit(
    store: Store, breaks: Breaks, column: str, value: Any, message: str
) -> None:
    store.append([make_turn("t")])
    breaks(f"UPDATE turns SET {column} = ? WHERE turn_id = 't'", value)
    [finding] = found(store, "lengths")
    assert finding.subject == "turn t"
    assert message in finding.message


def test_a_log_probability_that_is_no_number(store: Store, breaks: Breaks) -> None:
    store.append([make_turn("t"), make_turn("known", untrainable="non_finite")])
    for name in ("t", "known"):
        breaks(
            f"UPDATE turns SET logprobs = ? WHERE turn_id = '{name}'",
            blob(logprob_array([-1.0, math.nan])),
        )
    [finding] = found(store, "logprobs")
    assert finding.subject == "turn t"


@pytest.mark.databases("sqlite", "postgres")
def test_version_spans_that_do_not_cover_the_tokens(store: Store, breaks: Breaks) -> None:
    store.append([make_turn("t"), make_turn("u")])
    breaks("UPDATE turns SET policy_versions = '[[0, 1]]' WHERE turn_id = 't'")
    breaks("UPDATE turns SET last_version = 4 WHERE turn_id = 'u'")
    findings = found(store, "spans")
    assert [f.subject for f in findings] == ["turn t", "turn u"]
    assert "cover 1 of 2 sampled tokens" in findings[0].message
    assert "its last version is 0, and 4 is recorded" in findings[1].message


def test_a_request_that_cannot_be_rebuilt(store: Store, breaks: Breaks) -> None:
    for turn in conversation():
        store.append([turn])
    breaks("UPDATE turns SET request = (SELECT request FROM turns WHERE turn_id = 'r.3') "
           "WHERE turn_id = 'r.1'")  # fmt: skip
    first, *after = found(store, "texts")
    assert first.subject == "turn r.1"
    assert "its tokens are whole" in first.fix
    assert [f.message for f in after] == [
        "it is a delta to that of turn r.1, which is broken (rollout r)",
        "it is a delta to that of turn r.2, which is broken (rollout r)",
    ]
    # The fix that it names does it.
    drop(store, "r")
    assert found(store, "texts") == []
