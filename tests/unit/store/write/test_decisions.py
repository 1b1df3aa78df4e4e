"""Decisions about versions: written once, acted on once."""

from __future__ import annotations

from typing import Any

import pytest

from tracegrad.store import Decision, Store

WHO: dict[str, Any] = {"by": "ann@host", "reason": "replies are empty"}


def test_decisions_are_kept_in_order_with_who_and_why(store: Store) -> None:
    given = [
        Decision(kind="promote", version=3, created_at=5.0, **WHO),
        Decision(kind="rollback", training="pause", created_at=4.0, **WHO),  # clocks may go back
        Decision(kind="resume", created_at=6.0, by="guard:length", reason="it is over"),
    ]
    numbers = [store.decide(one) for one in given]
    assert numbers == sorted(set(numbers))
    found = store.decisions()
    assert [one.seq for one in found] == numbers
    for one, back in zip(given, found, strict=True):
        for name in ("kind", "version", "training", "by", "reason", "created_at"):
            assert getattr(back, name) == getattr(one, name)
        assert back.acted_at is None
        assert back.outcome is None
        assert back.refused is None
    assert [one.seq for one in store.decisions(after=numbers[0])] == numbers[1:]
    assert store.decisions(after=numbers[-1]) == []


def test_what_was_acted_on_is_not_open_any_more(store: Store) -> None:
    first = store.decide(Decision(kind="pin", version=1, **WHO))
    second = store.decide(Decision(kind="pause", **WHO))
    store.close_decision(first, {"refused": "there is no version 1"})
    assert [one.seq for one in store.open_decisions()] == [second]
    closed = store.decisions()[0]
    assert closed.acted_at is not None
    assert closed.refused == "there is no version 1"
    with pytest.raises(ValueError, match=f"seq: decision {first} is closed"):
        store.close_decision(first, {})
    with pytest.raises(ValueError, match="seq: decision 99 is unknown"):
        store.close_decision(99, {})


def test_decisions_outlive_the_process_that_made_them(store: Store, url: str) -> None:
    seq = store.decide(Decision(kind="unpin", version=2, **WHO))
    with Store.open(url) as again:
        assert [one.seq for one in again.open_decisions()] == [seq]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"kind": "undo"}, "kind"),
        ({"kind": "promote"}, "version"),
        ({"kind": "pin", "version": -1}, "version"),
        ({"kind": "pause", "version": 1}, "version"),
        ({"kind": "rollback"}, "training"),
        ({"kind": "rollback", "training": "stop"}, "training"),
        ({"kind": "resume", "training": "continue"}, "training"),
        ({"kind": "pause", "by": ""}, "by"),
        ({"kind": "pause", "reason": " "}, "reason"),
    ],
)
def test_a_wrong_decision_names_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        Decision(**(WHO | fields))


def test_they_are_counted_by_kind_and_by_who_decided(store: Store) -> None:
    for by in ("guard:questions", "guard:no_ops,kl", "gate:canary", "ann@host", "odd:name@host"):
        store.decide(Decision(kind="pause", by=by, reason="why"))
    store.decide(Decision(kind="resume", by="ann@host", reason="why"))
    assert store.count_decisions() == {
        ("pause", "guard"): 2,
        ("pause", "gate"): 1,
        ("pause", "person"): 2,
        ("resume", "person"): 1,
    }
