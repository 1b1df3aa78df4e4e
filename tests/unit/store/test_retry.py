"""Transactions that lost are tried again, a few times."""

from __future__ import annotations

import pytest

from tracegrad.store import StoreUnavailable, retry
from tracegrad.store.databases import Conflict


class Losing:
    """Loses so many times."""

    def __init__(self, times: int, error: type[Exception] = Conflict) -> None:
        self.left, self.error, self.calls = times, error, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.left:
            raise self.error(f"lost {self.calls}")
        return "won"


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: high)
    monkeypatch.setattr(retry.time, "sleep", slept.append)
    return slept


@pytest.mark.parametrize("times", [0, 1, 7])
def test_what_loses_a_few_times_wins_in_the_end(times: int, pauses: list[float]) -> None:
    work = Losing(times)
    assert retry.retry_on_conflict(work) == "won"
    assert work.calls == times + 1
    assert pauses == sorted(pauses)
    assert sum(pauses) < 1


def test_what_always_loses_is_unavailable() -> None:
    work = Losing(100)
    with pytest.raises(StoreUnavailable, match="lost 8"):
        retry.retry_on_conflict(work)


def test_other_errors_are_raised_at_once(pauses: list[float]) -> None:
    work = Losing(100, StoreUnavailable)
    with pytest.raises(StoreUnavailable, match="lost 1"):
        retry.retry_on_conflict(work)
    with pytest.raises(KeyError, match="lost 8"):
        retry.retry_on_conflict(Losing(100, KeyError), on=(Conflict, KeyError))
