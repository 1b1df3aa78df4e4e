"""Guards over rollouts: which hack raises which alarm, and that clean traffic raises none."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tracegrad_trainer.guards import Alarm, DriftGuards, GuardSettings
from tracegrad_trainer.guards.behaviour import Behaviour
from tracegrad_trainer.guards.drift import ObservedRollout

GROUP = 8


def clean(draw: random.Random) -> Behaviour:
    """Of an agent that now and then does each of it."""
    return Behaviour(
        invalid_tool_calls=draw.random() < 0.05,
        no_ops=draw.random() < 0.05,
        questions=draw.random() < 0.1,
        refusals=draw.random() < 0.02,
        reply_tokens=round(draw.lognormvariate(4, 0.5)),
    )


def traffic(
    draw: random.Random,
    groups: int,
    *,
    first: int = 0,
    hack: str | None = None,
    share: float = 0.7,
    size: int = GROUP,
) -> Iterator[list[ObservedRollout]]:
    """Sixteen groups a version; with `hack` that share of its rollouts does it."""
    for number in range(first, first + groups):
        group = []
        for _ in range(size):
            one = clean(draw)
            if hack is not None and draw.random() < share:
                one = hacked(one, hack)
            reward = float(draw.random() < (0.0 if hack == "unsolved" else 0.4))
            group.append(ObservedRollout(one, number // 16, reward))
        yield group


def hacked_one(one: ObservedRollout, hack: str) -> ObservedRollout:
    return replace(one, behaviour=hacked(one.behaviour, hack))


def hacked(one: Behaviour, hack: str) -> Behaviour:
    if hack == "long_replies":
        return Behaviour(*(getattr(one, n) for n in one.__slots__[:-1]), one.reply_tokens * 40)
    if hack == "short_replies":
        return Behaviour(*(getattr(one, n) for n in one.__slots__[:-1]), 1)
    if hack == "unsolved":
        return one
    return Behaviour(**{n: getattr(one, n) for n in one.__slots__} | {hack: True})


def first_alarms(guards: DriftGuards, groups: Iterator[list[ObservedRollout]]) -> list[Alarm]:
    return next((found for group in groups if (found := guards.observe([group]))), [])


@pytest.mark.parametrize(
    "hack",
    [
        *("invalid_tool_calls", "no_ops", "questions", "refusals"),
        *("long_replies", "short_replies", "unsolved"),
    ],
)
def test_each_hack_raises_its_own_alarm(hack: str) -> None:
    draw = random.Random(4)
    guards = DriftGuards(GuardSettings())
    assert not first_alarms(guards, traffic(draw, 320))
    [alarm] = first_alarms(guards, traffic(draw, 160, first=320, hack=hack))
    assert alarm.signal == hack
    assert alarm.last_good is not None
    assert 18 <= alarm.last_good <= 20  # the hack began with version 20
    assert f"since version {alarm.last_good + 1}" in alarm.message


def test_ten_clean_runs_raise_none() -> None:
    for seed in range(10):
        assert not first_alarms(DriftGuards(GuardSettings()), traffic(random.Random(seed), 400))


def test_a_task_whose_attempts_all_do_it_is_one_value() -> None:
    """One task in twenty has all its sixteen attempts ask back, from the start: nothing drifts."""
    for seed in range(10):
        draw = random.Random(seed)
        groups = (
            [hacked_one(one, "questions") for one in group] if draw.random() < 0.05 else group
            for group in traffic(draw, 800, size=16)
        )
        assert not first_alarms(DriftGuards(GuardSettings()), groups)


def test_rollouts_that_nobody_grouped_are_values_of_their_own() -> None:
    draw = random.Random(9)
    guards = DriftGuards(GuardSettings())
    assert not first_alarms(guards, traffic(draw, 1600, size=1))
    [alarm] = first_alarms(guards, traffic(draw, 160, first=1600, hack="questions", size=1))
    assert "% of the last " in alarm.message
    assert " rollouts, since version " in alarm.message


def test_a_rollback_keeps_no_version_of_the_group_in_which_it_began() -> None:
    """Its attempts may be of several versions."""
    guards = DriftGuards(GuardSettings(baseline=16))
    calm = Behaviour(False, False, False, False, 10)
    asks = Behaviour(False, False, True, False, 10)
    for _ in range(16):
        assert not guards.observe([[ObservedRollout(calm, 3, 1.0)] * 4])
    mixed = [ObservedRollout(asks, version, 1.0) for version in (7, 5, 6, 7)]
    [alarm] = next(found for _ in range(20) if (found := guards.observe([mixed])))
    assert alarm.last_good == 4


def test_before_the_first_version_there_is_none_to_return_to() -> None:
    guards = DriftGuards(GuardSettings(baseline=16))
    calm = Behaviour(False, False, False, False, 10)
    asks = Behaviour(False, False, True, False, 10)
    for _ in range(16):
        assert not guards.observe([[_of(calm, 0)]])
    [alarm] = next(found for _ in range(20) if (found := guards.observe([[_of(asks, 0)]])))
    assert alarm.last_good is None
    assert guards.good_versions() == set()


def _of(behaviour: Behaviour, version: int, reward: float | None = 1.0) -> ObservedRollout:
    return ObservedRollout(behaviour, version, reward)


def test_a_group_is_unsolved_where_its_best_attempt_is() -> None:
    """And where it is known of all: one that has no reward yet may have solved the task."""
    guards = DriftGuards(GuardSettings(watch=("unsolved",), solved_from=0.5))

    def shares(*rewards: float | None) -> dict[str, float]:
        calm = Behaviour(False, False, False, False, 10)
        return dict(guards.group_shares([_of(calm, 1, reward) for reward in rewards]))

    assert shares(0.0, 0.49) == {"unsolved": 1}
    assert shares(0.0, 0.5) == {"unsolved": 0}
    assert shares(0.0, None) == shares(0.0) == {}


def test_replies_are_held_against_the_baselines_lengths() -> None:
    """Long is above twice the baseline's 10 tokens, short below half of them."""
    guards = DriftGuards(GuardSettings(baseline=16, watch=("long_replies", "short_replies")))

    def shares(tokens: int) -> dict[str, float]:
        return dict(guards.group_shares([_of(Behaviour(False, False, False, False, tokens), 1)]))

    assert [shares(10) for _ in range(16)] == [{}] * 16
    found = [(shares(n)["short_replies"], shares(n)["long_replies"]) for n in (4, 5, 20, 21)]
    assert found == [(1, 0), (0, 0), (0, 0), (0, 1)]


def test_lengths_need_no_second_baseline() -> None:
    guards = DriftGuards(GuardSettings(baseline=16))
    for _ in range(16):
        assert not guards.observe([[_of(Behaviour(False, False, False, False, 10), 1)]])
    long = [_of(Behaviour(False, False, False, False, 40), 2)]
    [alarm] = next(found for _ in range(20) if (found := guards.observe([long])))
    assert (alarm.signal, alarm.last_good) == ("long_replies", 1)


def test_after_an_alarm_the_signal_begins_anew() -> None:
    draw = random.Random(5)
    guards = DriftGuards(GuardSettings(baseline=32))
    first_alarms(guards, traffic(draw, 40))
    assert first_alarms(guards, traffic(draw, 40, first=40, hack="questions"))
    # Somebody let it go on: what is usual now raises no alarm.
    assert not first_alarms(guards, traffic(draw, 100, first=80, hack="questions"))


def test_only_what_is_watched() -> None:
    draw = random.Random(6)
    guards = DriftGuards(GuardSettings(watch=("refusals",), baseline=32))
    first_alarms(guards, traffic(draw, 40))
    assert not first_alarms(guards, traffic(draw, 40, first=40, hack="questions"))
    assert set(guards.shares()) == {"refusals"}


@pytest.mark.parametrize("hack", ["no_ops", "long_replies"])
def test_state_goes_on_where_it_was(hack: str) -> None:
    settings = GuardSettings(baseline=16)
    whole, first = DriftGuards(settings), DriftGuards(settings)
    before = list(traffic(random.Random(7), 30))
    after = list(traffic(random.Random(8), 30, first=30, hack=hack))
    for group in before:
        whole.observe([group])
        first.observe([group])
    second = DriftGuards(settings)
    second.restore(json.loads(json.dumps(first.state())))
    assert first_alarms(second, iter(after)) == first_alarms(whole, iter(after)) != []


def test_limits_on_a_steps_own_figures() -> None:
    guards = DriftGuards(GuardSettings(min_entropy=0.1, max_kl=0.5))
    assert not guards.check_step(0.2, 0.4)
    assert not guards.check_step(0.1, 0.5)
    assert not guards.check_step(None, None)
    low, high = guards.check_step(0.05, 0.6)
    assert low.message == "entropy: 0.05 nats a token, below guards.min_entropy = 0.1"
    assert high.message == "kl: 0.6 nats a token, above guards.max_kl = 0.5"


def test_settings_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"'\(' is no regular expression"):
        GuardSettings(refusals=("(",))
    with pytest.raises(ValueError, match="watch"):
        GuardSettings(watch=("hacks",))  # type: ignore[arg-type]
