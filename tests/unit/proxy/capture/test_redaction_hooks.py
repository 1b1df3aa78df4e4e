"""Hooks see all texts before they are stored, and none is stored when a hook fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.system.log_lines import our_records
from tracegrad.events import (
    Event,
    Json,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Span,
    Turn,
    logprob_array,
    token_id_array,
)
from tracegrad.proxy.capture.redaction import (
    Hook,
    HookError,
    Redactor,
    load_hooks,
    texts_of,
    with_texts,
)

TURN = Turn(
    rollout_id="r",
    dialect="chat",
    model="m",
    prompt_token_ids=token_id_array([1, 2]),
    completion_token_ids=token_id_array([3]),
    completion_logprobs=logprob_array([-0.5]),
    policy_versions=((0, 1),),
    sampling={"temperature": 1.0, "stop": ["geheim"]},
    request={"messages": [{"role": "user", "content": "geheim?"}]},
    response={"choices": [{"message": {"content": "geheim!"}}]},
)
SPAN = Span(
    trace_id="1" * 32,
    span_id="1" * 16,
    rollout_id="r",
    name="geheim",
    start_ns=0,
    end_ns=1,
    attributes={"tool.input": {"deep": ["geheim"]}},
)
OPENED = RolloutStarted(rollout_id="r", task_id="t", task={"q": "geheim"}, tags={"a": "geheim"})
FINISHED = RolloutFinished(rollout_id="r", outcome=Outcome.AGENT_ERROR, error="geheim")
REWARD = Reward(rollout_id="r", value=1.0)
EVENTS: list[Event] = [TURN, SPAN, OPENED, FINISHED, REWARD]
WITH_TEXTS = [event for event in EVENTS if event is not REWARD]


def redactor(*functions: Any) -> Redactor:
    return Redactor([Hook(f"test:{function.__name__}", function) for function in functions])


def upper(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: value[key] if key == "type" else upper(value[key]) for key in value}
    if isinstance(value, list):
        return [upper(item) for item in value]
    return value.replace("geheim", "***") if isinstance(value, str) else value


def clear_in_place(record: Json) -> Json:
    for name in list(record):
        if isinstance(record[name], dict):
            record[name].clear()
    return record


async def test_without_hooks_nothing_is_touched() -> None:
    assert await Redactor([]).redact(EVENTS) is EVENTS


async def test_a_hook_sees_every_text_of_every_event() -> None:
    reported: list[str] = []

    def look(record: Json) -> Json:
        reported.append(record["type"])
        return upper(record)

    kept = await redactor(look).redact(EVENTS)
    assert reported == ["turn", "span", "rollout_started", "rollout_finished"]
    assert "geheim" not in repr(kept)
    turn, span, opened, finished, reward = kept
    assert isinstance(turn, Turn)
    assert turn.request == {"messages": [{"role": "user", "content": "***?"}]}
    assert turn.sampling == {"temperature": 1.0, "stop": ["***"]}
    assert isinstance(span, Span)
    assert (span.name, span.attributes) == ("***", {"tool.input": {"deep": ["***"]}})
    assert isinstance(opened, RolloutStarted)
    assert (opened.task, opened.tags, opened.task_id) == ({"q": "***"}, {"a": "***"}, "t")
    assert isinstance(finished, RolloutFinished)
    assert (finished.error, finished.outcome) == ("***", Outcome.AGENT_ERROR)
    assert reward is REWARD


async def test_tokens_stay_as_they_were() -> None:
    [turn] = await redactor(lambda record: None).redact([TURN])
    assert isinstance(turn, Turn)
    assert (turn.request, turn.response, turn.sampling) == (None, None, {"temperature": 1.0})
    assert turn.prompt_token_ids == TURN.prompt_token_ids
    assert turn.completion_token_ids == TURN.completion_token_ids
    assert turn.completion_logprobs == TURN.completion_logprobs
    assert turn.turn_id == TURN.turn_id


async def test_a_hook_that_drops_all_is_the_last() -> None:
    def never(record: Json) -> Json:
        raise AssertionError

    drops = redactor(lambda record: None, never)
    kept = await drops.redact(WITH_TEXTS)
    assert "geheim" not in repr(kept)
    assert drops.failed == 0


async def test_hooks_follow_one_another() -> None:
    def one(record: Json) -> Json:
        return {**record, "error": record["error"] + "1"}

    def two(record: Json) -> Json:
        return {**record, "error": record["error"] + "2"}

    [finished] = await redactor(one, two).redact([FINISHED])
    assert isinstance(finished, RolloutFinished)
    assert finished.error == "geheim12"


async def test_a_hook_works_on_a_copy() -> None:
    before = repr(EVENTS)
    kept = await redactor(clear_in_place).redact(EVENTS)
    assert repr(EVENTS) == before
    assert kept[0].request == {}  # type: ignore[union-attr]


async def test_hooks_run_beside_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def where(record: Json) -> Json:
        threads.append(threading.current_thread())
        return record

    await redactor(where).redact([FINISHED])
    assert threads != [threading.current_thread()]


def raises(record: Json) -> Json:
    raise KeyError(f"what nobody may read: {record}")


def returns_text(record: Json) -> Any:
    return "geheim"


def breaks_types(record: Json) -> Any:
    return dict.fromkeys(record, 7)


def turns_in_circles(record: Json) -> Json:
    for value in list(record.values()):
        if isinstance(value, dict):
            value["itself"] = value
    return {**record, "task": record, "error": 0}


def forgets_the_first(record: Json) -> Json:
    if record["type"] in ("turn", "span"):
        raise ValueError("geheim")
    return upper(record)


@pytest.mark.parametrize("hook", [raises, returns_text, breaks_types, turns_in_circles])
async def test_where_a_hook_fails_no_text_is_stored(
    hook: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failing = redactor(hook)
    kept = await failing.redact(EVENTS)
    assert "geheim" not in repr(kept)
    assert [type(event) for event in kept] == [type(event) for event in EVENTS]
    assert kept[0].completion_token_ids == TURN.completion_token_ids  # type: ignore[union-attr]
    assert kept[1].name == "[redacted]"  # type: ignore[union-attr]
    assert failing.failed == len(WITH_TEXTS)
    said = our_records(caplog)
    first = said[0]
    assert first.levelno == logging.ERROR
    assert f"test:{hook.__name__} failed" in first.getMessage()
    assert "a Turn is stored without its texts; 1 so far" in first.getMessage()
    assert "geheim" not in caplog.text
    assert [record.args[-1] for record in said] == [1, 2, 4]  # type: ignore[index]


async def test_a_failure_concerns_its_own_event_alone() -> None:
    failing = redactor(forgets_the_first)
    turn, *_, finished, _ = await failing.redact(EVENTS)
    assert turn.request is None  # type: ignore[union-attr]
    assert finished.error == "***"  # type: ignore[union-attr]
    assert failing.failed == 2


async def test_a_second_hook_that_fails_is_named(caplog: pytest.LogCaptureFixture) -> None:
    await redactor(upper, raises).redact([FINISHED])
    assert "test:raises failed (KeyError at " in caplog.text


@settings(deadline=None)
@given(st.sampled_from(WITH_TEXTS), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
))  # fmt: skip
def test_whatever_a_hook_returns_an_event_comes_of_it(event: Event, returned: Any) -> None:
    kept = redactor(lambda record: returned).redact_event(event)
    assert type(kept) is type(event)
    assert "geheim" not in repr(kept)


@pytest.mark.parametrize("event", WITH_TEXTS)
def test_what_a_hook_gives_back_unchanged_is_the_event(event: Event) -> None:
    texts = texts_of(event)
    assert texts is not None
    assert with_texts(event, texts) == event


def names(*hooks: Hook) -> Sequence[str]:
    return [hook.name for hook in hooks]


def test_hooks_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_hooks.py").write_text("def clean(record): return record\n")
    monkeypatch.syspath_prepend(tmp_path)
    hooks = load_hooks(["my_hooks:clean", "tracegrad.proxy.capture.redaction:secrets"])
    assert names(*hooks) == ["my_hooks:clean", "tracegrad.proxy.capture.redaction:secrets"]
    assert hooks[0].function({"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("json:no_such_function", "no_such_function"),
        ("json:__doc__", "not a plain function"),
        ("broken_hooks:f", "ZeroDivisionError"),
        ("slow_hooks:f", "not a plain function"),
    ],
)
def test_a_hook_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    (tmp_path / "broken_hooks.py").write_text("1 / 0\n")
    (tmp_path / "slow_hooks.py").write_text("async def f(record): return record\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HookError, match=r"^redact\[1\]: ") as caught:
        load_hooks(["tracegrad.proxy.capture.redaction:secrets", name])
    assert words in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
