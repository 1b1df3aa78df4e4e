"""The scheduler: groups are filled, failures replaced, stragglers cut; in any order of events."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tracegrad.events import Outcome
from tracegrad.runner.scheduler import (
    GroupKey,
    GroupPlan,
    Scheduler,
    SchedulerSettings,
    Ticket,
)

DONE, INFRA, ENV = Outcome.COMPLETED, Outcome.INFRA_ERROR, Outcome.ENV_ERROR


def scheduler(*groups: GroupPlan | str, **settings: int) -> Scheduler:
    plans = [one if isinstance(one, GroupPlan) else GroupPlan(GroupKey(0, one)) for one in groups]
    return Scheduler(plans, SchedulerSettings(**settings), random.Random(0))


def begin_all(of: Scheduler, now: float = 0.0) -> list[Ticket]:
    """Their agents, too."""
    begun = []
    while (ticket := of.next(now)) is not None:
        of.sandbox_tried(ticket, True, now)
        of.agent_began(ticket)
        begun.append(ticket)
    return begun


def end(of: Scheduler, ticket: Ticket, outcome: Outcome = DONE, now: float = 0.0) -> list[Ticket]:
    cut = of.ended(ticket, outcome, now)
    of.stopped(ticket)
    return list(cut)


def test_groups_are_begun_one_after_the_other_within_concurrency() -> None:
    some = scheduler("a", "b", attempts=3, agents=4, ahead=0)
    begun = begin_all(some)
    assert [ticket.group.task_id for ticket in begun] == ["a", "a", "a", "b"]
    assert some.next(0.0) is None
    assert end(some, begun[0]) == []
    (another,) = begin_all(some)
    assert another == Ticket(GroupKey(0, "b"), 1)


def test_sandboxes_start_ahead_of_agents() -> None:
    some = scheduler("a", attempts=9, agents=2, ahead=3)
    begun = [some.next(0.0) for _ in range(6)]
    assert begun.count(None) == 1
    first = begun[0]
    assert first is not None
    some.agent_began(first)
    assert some.next(0.0) is None
    some.agent_ended(first)
    assert some.next(0.0) is not None, "its agent has ended, its reward is computed meanwhile"


def test_a_failure_is_replaced_after_a_delay_and_the_group_is_filled() -> None:
    some = scheduler("a", attempts=2, retries=1)
    one, two = begin_all(some)
    end(some, one)
    end(some, two, INFRA, now=10.0)
    assert some.next(10.0) is None
    assert not some.is_done
    wake = some.wake_at(10.0)
    assert wake is not None
    assert 10.5 <= wake <= 11.5, "a second, with jitter"
    (again,) = begin_all(some, wake)
    assert again.number == 2, "a rollout of its own"
    end(some, again)
    assert some.is_done
    assert (some.counts.filled, some.counts.replaced) == (1, 1)
    assert some.counts.ended == {DONE: 2, INFRA: 1}


def test_the_budget_of_replacements_ends() -> None:
    some = scheduler("a", attempts=2, retries=1)
    now, ended = 0.0, 0
    while not some.is_done:
        for ticket in begin_all(some, now):
            end(some, ticket, INFRA, now)
            ended += 1
        now += 1000
    assert ended == 2 + 2 * 1
    assert (some.counts.groups, some.counts.filled) == (1, 0)


def test_a_task_whose_environment_is_broken_is_given_up() -> None:
    some = scheduler("broken", "fine", attempts=8, agents=2, ahead=0, retries=2)
    ended: Counter[str] = Counter()
    now = 0.0
    while not some.is_done:
        for ticket in begin_all(some, now):
            name = ticket.group.task_id
            ended[name] += 1
            end(some, ticket, ENV if name == "broken" else DONE, now)
        now += 100
    assert ended == {"broken": 4, "fine": 8}, "three, and the one that ran beside the third"


def test_stragglers_are_cut_when_the_group_is_filled() -> None:
    some = scheduler("a", attempts=2, over_sample=2)
    begun = begin_all(some)
    assert len(begun) == 4
    assert end(some, begun[3]) == []
    assert end(some, begun[1]) == [begun[0], begun[2]]
    assert end(some, begun[0], Outcome.ABORTED) == []
    assert not some.is_done, "one of them is not ended yet"
    # It ended by itself before the cut came: it counts as what it is.
    assert end(some, begun[2]) == []
    assert some.is_done
    assert some.counts.cut == 2


def test_a_spare_attempt_makes_up_for_a_failure_without_a_replacement() -> None:
    some = scheduler("a", attempts=2, over_sample=1)
    one, two, three = begin_all(some)
    end(some, one, INFRA)
    end(some, two)
    end(some, three)
    assert some.is_done
    assert (some.counts.replaced, some.counts.filled) == (0, 1)


def test_starts_that_fail_pause_all_others() -> None:
    some = scheduler("a", attempts=20, agents=1, ahead=9, retries=5)
    for _ in range(5):
        ticket = some.next(0.0)
        assert ticket is not None
        some.sandbox_tried(ticket, False, 0.0)
        end(some, ticket, INFRA)
    assert some.next(5.0) is None
    wake = some.wake_at(5.0)
    assert wake is not None
    assert some.next(1000.0) is not None
    assert some.next(1000.0) is None, "one is tried"
    assert some.breaker.opened == 1


@pytest.mark.parametrize(
    ("ended", "left"),
    [
        ([], 4),
        ([DONE], 3),
        ([DONE, INFRA], 3),
        ([DONE] * 4, 0),
        ([DONE, Outcome.ABORTED], 3),
        ([INFRA] * 8, 4),
        ([INFRA, *[Outcome.ABORTED] * 4] * 8, 4),
        ([INFRA] * 11, 1),
        ([INFRA] * 12, 0),
        ([ENV] * 3, 0),
    ],
)
def test_a_group_goes_on_where_it_was(ended: Sequence[Outcome], left: int) -> None:
    some = scheduler(GroupPlan(GroupKey(0, "a"), ended), attempts=4, retries=2)
    begun = begin_all(some)
    assert len(begun) == left
    assert [ticket.number for ticket in begun] == [*range(len(ended), len(ended) + left)]
    for ticket in begun:
        end(some, ticket)
    assert some.is_done


@pytest.mark.parametrize(
    ("ended", "left"),
    [([INFRA], 3), ([INFRA] * 2, 2), ([INFRA] * 3, 2), ([INFRA, DONE], 2), ([INFRA] * 5, 1)],
)
def test_spare_attempts_are_made_again_before_replacements(
    ended: Sequence[Outcome], left: int
) -> None:
    plan = GroupPlan(GroupKey(0, "a"), ended)
    some = scheduler(plan, attempts=2, over_sample=2, retries=1 if len(ended) > 3 else 2)
    assert len(begin_all(some)) == left


def test_nothing_begins_after_a_stop() -> None:
    some = scheduler("a", "b", attempts=2, agents=1, ahead=0)
    (ticket,) = begin_all(some)
    assert list(some.stop()) == [ticket]
    end(some, ticket, Outcome.ABORTED)
    assert some.next(0.0) is None
    assert some.is_done


class Attempts(RuleBasedStateMachine):
    """Any order of begins, starts, ends, failures, time and stops."""

    @initialize(
        attempts=st.integers(1, 4),
        over_sample=st.integers(0, 3),
        agents=st.integers(1, 5),
        ahead=st.integers(0, 3),
        retries=st.integers(0, 2),
        groups=st.integers(0, 5),
    )
    def make(
        self,
        attempts: int,
        over_sample: int,
        agents: int,
        ahead: int,
        retries: int,
        groups: int,
    ) -> None:
        self.settings = SchedulerSettings(
            attempts=attempts, over_sample=over_sample, agents=agents, ahead=ahead, retries=retries
        )
        plans = (GroupPlan(GroupKey(0, str(name))) for name in range(groups))
        self.made = groups
        self.some = Scheduler(plans, self.settings, random.Random(0))
        self.now = 0.0
        self.stages: dict[Ticket, str] = {}
        self.seen: set[Ticket] = set()
        self.scored: Counter[GroupKey] = Counter()
        self.tried: Counter[GroupKey] = Counter()
        self.ended: Counter[Outcome] = Counter()
        self.stopped = False

    def of(self, *stages: str) -> list[Ticket]:
        return sorted(ticket for ticket, stage in self.stages.items() if stage in stages)

    @rule()
    def begin(self) -> None:
        ticket = self.some.next(self.now)
        if ticket is not None:
            assert not self.stopped
            assert ticket not in self.seen, "no attempt twice"
            assert self.scored[ticket.group] < self.settings.attempts, "the group is filled"
            self.seen.add(ticket)
            self.tried[ticket.group] += 1
            self.stages[ticket] = "starting"

    @precondition(lambda self: self.of("starting"))
    @rule(data=st.data(), came=st.booleans())
    def start(self, data: st.DataObject, came: bool) -> None:
        ticket = data.draw(st.sampled_from(self.of("starting")))
        self.some.sandbox_tried(ticket, came, self.now)
        self.stages[ticket] = "ready" if came else "lost"

    @precondition(lambda self: self.of("ready") and len(self.of("agent")) < self.settings.agents)
    @rule(data=st.data())
    def agent(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.of("ready")))
        self.some.agent_began(ticket)
        self.stages[ticket] = "agent"

    @precondition(lambda self: self.of("agent"))
    @rule(data=st.data())
    def agent_ends(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.of("agent")))
        self.some.agent_ended(ticket)
        self.stages[ticket] = "reward"

    @precondition(lambda self: self.of("starting", "ready", "lost", "agent", "reward"))
    @rule(data=st.data(), outcome=st.sampled_from(Outcome))
    def finish(self, data: st.DataObject, outcome: Outcome) -> None:
        stages = ("starting", "ready", "lost", "agent", "reward")
        ticket = data.draw(st.sampled_from(self.of(*stages)))
        was = self.scored[ticket.group]
        cut = self.some.ended(ticket, outcome, self.now)
        self.stages[ticket] = "stopping"
        self.ended[outcome] += 1
        self.scored[ticket.group] += outcome.scored
        live = [one for one in self.of(*stages) if one.group == ticket.group]
        filled = was < self.settings.attempts <= self.scored[ticket.group]
        assert list(cut) == (live if filled else [])
        assert self.some.ended(ticket, Outcome.COMPLETED, self.now) == (), "the first end stands"

    @precondition(lambda self: self.of("stopping"))
    @rule(data=st.data())
    def stop_sandbox(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.of("stopping")))
        self.some.stopped(ticket)
        del self.stages[ticket]

    @rule(seconds=st.floats(0.1, 500))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    @precondition(lambda self: not self.stopped and self.made > 3)
    def stop(self) -> None:
        live = self.of("starting", "ready", "lost", "agent", "reward")
        assert list(self.some.stop()) == live
        self.stopped = True

    @invariant()
    def bounds_hold(self) -> None:
        if not hasattr(self, "some"):
            return
        settings = self.settings
        before = self.of("starting", "ready", "lost", "agent")
        assert len(before) <= settings.agents + settings.ahead
        assert len(self.stages) <= 2 * settings.agents + settings.ahead
        assert self.some.live == len(self.stages)
        assert self.some.counts.ended == self.ended
        budget = settings.attempts * (1 + settings.retries) + settings.over_sample
        assert all(tried <= budget for tried in self.tried.values())

    def teardown(self) -> None:
        """Whatever happened: what is left runs to its end, and every group is over, and filled."""
        if not hasattr(self, "some"):
            return
        failures = {key for key in self.tried if self.scored[key] < self.settings.attempts}
        for _ in range(10_000):
            if self.some.is_done:
                break
            for ticket in self.of("starting", "ready", "lost", "agent", "reward"):
                self.some.sandbox_tried(ticket, True, self.now)
                self.some.ended(ticket, Outcome.COMPLETED, self.now)
                self.scored[ticket.group] += 1
                self.stages[ticket] = "stopping"
            for ticket in self.of("stopping"):
                self.some.stopped(ticket)
                del self.stages[ticket]
            if (new := self.some.next(self.now)) is None:
                self.now += 1000
            else:
                self.stages[new] = "starting"
        assert self.some.is_done, "it never ends"
        assert self.some.next(self.now + 1e6) is None
        if not self.stopped:
            assert self.some.counts.groups == self.made
            short = self.made - self.some.counts.filled
            assert short <= len(failures)


Attempts.TestCase.settings = hypothesis_settings(
    max_examples=30, stateful_step_count=40, deadline=None
)
TestAttempts = Attempts.TestCase
