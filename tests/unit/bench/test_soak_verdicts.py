"""The soak's verdicts, on a half hour that is made up: a calm one passes, each fault is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench.kills.run import Calls
from bench.soak import trends
from bench.soak.dialects import DIALECTS
from bench.soak.equal_lengths import of_equal_lengths
from bench.soak.report import draw, page
from bench.soak.run import Outcome
from bench.soak.sampler import Sample, Usage
from bench.soak.traffic import Call
from bench.soak.verdicts import verdicts
from hypothesis import given
from hypothesis.strategies import integers, lists

from tracegrad.store.types import RewardPoint

BEGAN, MINUTES = 1_800_000_000.0, 30
ROLES = ("trainer serve", "proxy", "proxy workers", "rank launcher", "ranks", "vLLM engine")

Shape = Callable[[float], float]  # of the share of the time that has passed


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trends, "RESAMPLES", 150)


def outcome(
    *,
    minutes: float = MINUTES,
    leak: Shape | None = None,
    drift: Shape | None = None,
    longer: Shape | None = None,
    reward: Shape | None = None,
    **changes: Any,
) -> Outcome:
    """`leak`: the proxy's memory, times; `drift`: latency, times; `longer`: replies, times;
    `reward`: the mean reward."""
    seconds, random = 60 * minutes, np.random.default_rng(0)
    samples = [sample(at, at / seconds, leak, random) for at in np.arange(0, seconds, 5.0).tolist()]
    calls = [
        call(number, at, (drift or flat)(at / seconds), (longer or flat)(at / seconds), random)
        for number, at in enumerate(np.sort(random.uniform(0, seconds, int(2 * seconds))))
    ]
    rewards = [
        RewardPoint(BEGAN + at, float(random.random() < (reward or learnt)(at / seconds)), 1)
        for at in np.arange(0, seconds, 0.2)
    ]
    steps: Any = [SimpleNamespace(step=number) for number in range(1, 301)]
    calm = Outcome(
        began=BEGAN,
        ended=BEGAN + seconds,
        samples=samples,
        calls=calls,
        gate_s={},
        agents=Calls(answered=["chatcmpl-1"]),
        missing=0,
        rewards=rewards,
        before=0.05,
        after=0.95,
        steps=steps,
        left=[],
        complaints=[],
    )
    return replace(calm, **changes)


def flat(_: float) -> float:
    return 1.0


def learnt(share: float) -> float:
    return min(0.95, 0.1 + 5 * share)


def sample(at: float, share: float, leak: Shape | None, random: Any) -> Sample:
    def usage(role: str) -> Usage:
        grown = (leak or flat)(share) if role == "proxy workers" else 1.0
        rss = 200.0 * grown + random.normal(0, 0.2)
        return Usage(1, rss, rss, 40, 8, 0.2 * at)

    return Sample(
        at=BEGAN + at,
        roles={role: usage(role) for role in ROLES},
        disk_mib={"store": 0.1 * at, "checkpoints": 40.0, "versions": 12.0},
        checkpoints=3,
        metrics={"turns_committed_total": 30 * at},
    )


def call(number: int, at: float, times: float, longer: float, random: Any) -> Call:
    dialect = DIALECTS[number % len(DIALECTS)].name
    tokens = min(32, random.geometric(1 / (6 * longer)))
    seconds = times * (0.2 + 0.02 * tokens) * random.lognormal(0, 0.3)
    stream = number % 2 == 0
    return Call(
        at=BEGAN + at,
        dialect=dialect,
        kind="stream" if stream else "whole",
        tools=False,
        turn=1,
        seconds=seconds,
        first_s=times * 0.1 * random.lognormal(0, 0.3) if stream else None,
        answer_id=f"chatcmpl-{number}",
        tokens=tokens,
    )


def failed(found: Outcome) -> list[str]:
    return [verdict.what for verdict in verdicts(found) if verdict.met is False]


def test_a_calm_half_hour_passes(tmp_path: Path) -> None:
    found = outcome()
    judged = verdicts(found)
    assert [verdict.what for verdict in judged if verdict.met is not True] == []
    text = page(found, judged, "soak.svg")
    assert "**no**" not in text
    assert "vLLM engine (not ours)" in text
    draw(found, tmp_path / "soak.svg")
    assert (tmp_path / "soak.svg").read_text().startswith("<?xml")


def test_a_leak_of_the_proxy_is_named() -> None:
    assert failed(outcome(leak=lambda share: 1 + 0.06 * share)) == ["own memory of proxy workers"]


def test_a_cache_that_fills_in_the_warm_up_is_none() -> None:
    assert failed(outcome(leak=lambda share: 1 + min(0.3, share))) == []


def test_a_drift_of_latency_is_named() -> None:
    names = failed(outcome(drift=lambda share: 1 + max(0.0, 3 * (share - 0.5))))
    assert names == [
        "latency by dialect, median",
        "latency by dialect, 95th percentile",
        "latency by dialect, median time to first words",
        "latency of all, median",
    ]


def later(most: float) -> Shape:
    """From the middle of the time on it goes up to `most`."""
    return lambda share: 1 + (most - 1) * max(0.0, 2 * (share - 0.5))


def test_replies_that_grow_longer_are_no_drift_of_latency() -> None:
    assert failed(outcome(longer=later(3))) == []


def test_a_drift_of_latency_is_named_though_replies_grow_shorter() -> None:
    names = failed(outcome(drift=later(2), longer=lambda share: 1 / later(3)(share)))
    assert "latency by dialect, median" in names
    assert "latency by dialect, 95th percentile" in names


@given(
    earlier=lists(integers(0, 32), max_size=60),
    later=lists(integers(0, 32), max_size=60),
)
def test_as_many_of_each_length_stay(earlier: list[int], later: list[int]) -> None:
    windows = [[some_call(at, tokens) for at, tokens in enumerate(some)]
               for some in (earlier, later)]  # fmt: skip
    first, second = of_equal_lengths(*windows)
    for kept, all_of in zip((first, second), windows, strict=True):
        assert [one.at for one in kept] == sorted({one.at for one in kept})
        assert set(kept) <= set(all_of)
    lengths = [Counter(one.tokens.bit_length() for one in kept) for kept in (first, second)]
    assert lengths[0] == lengths[1]
    before, after = (Counter(each.bit_length() for each in some) for some in (earlier, later))
    assert lengths[0] == before & after


def test_those_that_stay_are_spread_over_all_the_time() -> None:
    kept, _ = of_equal_lengths([some_call(at, 5) for at in range(100)], [some_call(0, 6)] * 4)
    assert [one.at for one in kept] == [12, 37, 62, 87]


def some_call(at: float, tokens: int) -> Call:
    return Call(at=at, dialect="chat", kind="whole", tools=False, turn=1, seconds=1, tokens=tokens)


def test_a_reward_that_falls_is_named() -> None:
    names = failed(outcome(reward=lambda share: 0.9 if share < 0.7 else 0.7))
    assert names == ["mean reward in training, last third less middle third"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"missing": 1}, "answers whose turn is not stored"),
        ({"left": ["python -m vllm"]}, "processes left after SIGTERM"),
        ({"complaints": ["proxy.log: Traceback"]}, "errors in the logs"),
        ({"after": 0.2}, "greedy success on held-out tasks"),
        ({"steps": []}, "steps in order"),
        ({"agents": Calls(failed=Counter(e=1))}, "agents' calls that failed"),
    ],
)  # fmt: skip
def test_a_failure_is_named(changes: dict[str, Any], what: str) -> None:
    assert failed(outcome(minutes=16, **changes)) == [what]


def test_a_call_that_failed_is_named() -> None:
    found = outcome(minutes=16)
    calls = [replace(found.calls[0], error="status 500", answer_id=None), *found.calls[1:]]
    assert failed(replace(found, calls=calls)) == ["background calls that failed"]


def test_a_short_run_does_not_say_what_takes_long() -> None:
    judged = verdicts(outcome(minutes=6, leak=lambda share: 1 + share))
    by_name = {verdict.what: verdict for verdict in judged}
    assert by_name["own memory of proxy workers"].met is None
    assert by_name["own memory of proxy workers"].measured
    assert by_name["background calls that failed"].met is True
