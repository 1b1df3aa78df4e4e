"""Which first prompts of live rollouts are sampled again, in which order; why others are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from support.store.events import make_span, make_turn
from support.store.intake_requests import intake_request
from tracegrad.events import RolloutInferred, RolloutStarted
from tracegrad.genai_attributes import AGENT_NAME
from tracegrad.store import Store
from tracegrad.store.ledger.intake import Intake
from tracegrad_trainer.batches import BatchSettings
from tracegrad_trainer.cli.render_status import describe_unusable
from tracegrad_trainer.config.resample import RESAMPLE_OF, RESAMPLED, ResampleSettings
from tracegrad_trainer.resampling.live_prompts import LivePrompts

NOW = 10_000.0
USER = {"role": "user", "content": "where is 42?"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store


def prompts_of(store: Store, held_out: dict[str, str] | None = None, **more: Any) -> LivePrompts:
    settings = ResampleSettings(prompts="live", **more)
    return LivePrompts(store, settings, held_out, clock=lambda: NOW)


def live(
    store: Store,
    name: str,
    *,
    age_s: float = 10.0,
    tags: dict[str, str] | None = None,
    held_out: bool = False,
    agent: str | None = None,
    **call: Any,
) -> None:
    """A rollout of two turns, the first with this call; `agent`: the rollout's own."""
    request = {"model": "m", "messages": [USER], **call.pop("request", {})}
    first = make_turn(f"{name}.0", name, request=request, **call)
    second = make_turn(f"{name}.1", name, parent=first, request={**request, "tools": [TOOL]})
    opened = RolloutStarted(
        rollout_id=name,
        opened_at=NOW - age_s,
        tags=tags or {},
        held_out=held_out,
        agent=agent,
    )
    store.append([opened, first, second])


def taken(prompts: LivePrompts) -> list[str]:
    found = []
    while (one := prompts.take()) is not None:
        found.append(one.rollout_id)
    return found


def test_the_newest_come_first_and_each_once(store: Store) -> None:
    for name, age in (("old", 30.0), ("new", 10.0), ("middle", 20.0)):
        live(store, name, age_s=age)
    prompts = prompts_of(store)
    found, reasons = prompts.usable()
    assert (len(found), reasons) == (3, {})
    assert taken(prompts) == ["new", "middle", "old"]
    live(store, "newer", age_s=1.0)
    assert taken(prompts) == ["newer"]


def test_what_was_sampled_again_is_neither_sampled_again_nor_live(store: Store) -> None:
    live(store, "a")
    live(store, "again", tags={RESAMPLED: "true", RESAMPLE_OF: "a"})
    assert taken(prompts_of(store)) == []


def test_a_drivers_rollout_is_no_live_one_before_its_tags_are_there(store: Store) -> None:
    Intake(store).request(intake_request(in_flight=4))
    [place, *_] = Intake(store).ask(2).rollout_ids
    live(store, place)
    live(store, "a")
    assert taken(prompts_of(store)) == ["a"]


def test_a_call_whose_opening_may_yet_come_is_no_live_one(store: Store) -> None:
    """The opening may say that it is held out."""
    for name, age_s in (("now", 1.0), ("nobodys", 6.0)):
        turn = make_turn(name, name, request={"messages": [USER]}, created_at=NOW - age_s)
        store.append([RolloutInferred(rollout_id=name), turn])
    assert taken(prompts_of(store)) == ["nobodys"]


def test_only_young_ones_with_all_tags(store: Store) -> None:
    live(store, "a", tags={"app": "chat", "user": "u1"})
    live(store, "b", tags={"app": "mail"})
    live(store, "c", age_s=61.0, tags={"app": "chat"})
    prompts = prompts_of(store, tags={"app": "chat"}, max_age_s=60.0)
    found = prompts.take()
    assert found is not None
    assert (found.rollout_id, found.tags) == ("a", {"app": "chat", "user": "u1"})
    assert prompts.take() is None


def test_the_body_is_of_the_models_own_distribution(store: Store) -> None:
    bent = {"temperature": 0.0, "top_p": 0.1, "max_tokens": 9, "stream": True, "n": 1, "user": "u"}
    live(store, "a", request=bent)
    found = prompts_of(store).take()
    assert found is not None
    assert found.body["messages"] == [USER]
    assert found.body["max_tokens"] == 9
    assert found.body["temperature"] == 1.0
    assert not {"stream", "n", "user", "top_p", "tools"} & found.body.keys()


@pytest.mark.parametrize(
    ("reason", "call"),
    [
        ("tools", {"request": {"tools": [TOOL]}}),
        ("no_request", {"request": {"messages": "none"}}),
        ("not_chat", {"dialect": "completions", "request": {"prompt": "once"}}),
        ("held_out", {"tags": {"split": "held_out", "app": "chat"}}),
        ("held_out", {"held_out": True}),
    ],
)
def test_others_have_a_counted_reason(store: Store, reason: str, call: dict[str, Any]) -> None:
    live(store, "a", **call)
    live(store, "b", age_s=20.0)
    prompts = prompts_of(store, held_out={"split": "held_out"})
    found, reasons = prompts.usable()
    assert (len(found), reasons) == (1, {reason: 1})
    assert taken(prompts) == ["b"]
    assert prompts.unusable == {reason: 1}
    assert taken(prompts) == [], "nor is it counted twice"
    assert prompts.unusable == {reason: 1}
    assert describe_unusable(prompts.unusable).startswith("1 "), "in words"


def selecting(store: Store, **patterns: Any) -> LivePrompts:
    settings = ResampleSettings(prompts="live")
    selection = BatchSettings(**patterns)
    return LivePrompts(store, settings, selection=selection, clock=lambda: NOW)


def agents_at_work(store: Store) -> None:
    """Of each agent a prompt of long ago: named by its call, by its span, by its rollout; and one
    that nobody names."""
    live(store, "planner", age_s=90.0, agent="app", agent_name="planner")
    inside = make_span(1, "coder", attributes={AGENT_NAME: "coder"})
    store.append([inside])
    asked = {"parent_span_id": inside.span_id, "asked_model": "coder-model"}
    live(store, "coder", age_s=80.0, agent="app", **asked)
    live(store, "app", age_s=70.0, agent="app")
    live(store, "nobody", age_s=60.0)


def test_a_prompt_has_the_agent_that_training_would_see(store: Store) -> None:
    agents_at_work(store)
    prompts = prompts_of(store)
    found = [prompts.take() for _ in range(4)]
    assert [one and one.agent_name for one in found] == [None, "app", "coder", "planner"]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ({"agents": ["coder"]}, ["coder"]),
        ({"agents": ["!planner"]}, ["nobody", "app", "coder"]),
        ({"agents": ["app", "planner"]}, ["app", "planner"]),
        ({"agents": ["resample"]}, ["nobody"]),  # as their rollouts will be called
        ({"models": ["coder-model"]}, ["coder"]),
        ({"models": ["!coder-model"], "agents": ["!app"]}, ["nobody", "planner"]),
        ({"agents": ["codr"]}, []),
    ],
)
def test_what_training_would_not_select_is_not_sampled_again(
    store: Store, patterns: dict[str, list[str]], names: list[str]
) -> None:
    agents_at_work(store)
    prompts = selecting(store, **patterns)
    left_out = {"turn_not_selected": 4 - len(names)}
    assert prompts.usable()[1] == left_out
    assert taken(prompts) == names
    assert prompts.unusable == left_out
    assert "agents or models that are not trained" in describe_unusable(prompts.unusable)


def test_a_pattern_that_fits_no_prompt_is_said(store: Store) -> None:
    agents_at_work(store)
    prompts = selecting(store, agents=["codr", "planner"])
    prompts.usable()
    assert list(prompts.patterns.unmatched.values()) == [
        "batches.agents = 'codr' fits no turn; there are: 'app', 'coder', 'planner', 'resample'"
    ]


def test_whose_call_it_was_is_decided_when_spans_have_come(store: Store) -> None:
    """An agent's span is sent when it has ended, and its call is stored before that."""
    live(store, "by its call", age_s=2.0, agent_name="coder")
    live(store, "by its span", age_s=29.0, parent_span_id=f"{1:016x}")
    prompts = selecting(store, agents=["coder"])
    assert taken(prompts) == ["by its call"]
    assert prompts.unusable == {}
    store.append([make_span(1, "by its span", attributes={AGENT_NAME: "coder"})])
    prompts.clock = lambda: NOW + 2.0
    assert taken(prompts) == ["by its span"]


def test_without_a_selection_by_agent_nobody_waits_for_spans(store: Store) -> None:
    live(store, "a", age_s=2.0)
    assert taken(selecting(store, models=["m"])) == ["a"]


def test_what_is_sampled_again_is_no_live_tag() -> None:
    with pytest.raises(ValidationError, match="'resampled' is what rollouts carry that were"):
        ResampleSettings(prompts="live", tags={RESAMPLED: "true"})
