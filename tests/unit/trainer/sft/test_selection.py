"""One agent of several is learnt from a teacher's text, whose turns get their tokens here."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.trainer.char_model import char_tokenizer
from support.trainer.sft_samples import char_model, said, settings, store_at
from tracegrad.events import (
    Event,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Span,
    Turn,
    logprob_array,
    token_id_array,
)
from tracegrad.genai_attributes import AGENT_NAME
from tracegrad_trainer.sft.dataset import choose_examples
from tracegrad_trainer.sft.report import data_counts, format_record
from tracegrad_trainer.sft.schedule import SftData, build_data
from tracegrad_trainer.sft.tokenize import load_reply_tokenizer

TOKENIZER = char_tokenizer()


def text_turn(name: str, rollout: str, messages: list[dict[str, Any]], **more: Any) -> Turn:
    """As the proxy stores a call to a provider that tells no tokens; the reply is `name`."""
    return Turn(
        turn_id=f"{rollout}/{name}",  # imported ids may have any characters
        rollout_id=rollout,
        dialect="chat",
        model="served",
        prompt_token_ids=token_id_array(),
        completion_token_ids=token_id_array(),
        completion_logprobs=logprob_array(),
        policy_versions=(),
        untrainable="no_tokens",
        request={"model": more.get("asked_model", "served"), "messages": messages},
        response={"choices": [{"message": {"role": "assistant", "content": name}}]},
        **more,
    )


def span(name: str, rollout: str, agent: str | None) -> Span:
    return Span(
        trace_id=rollout.encode().hex().zfill(32), span_id=span_id(name, rollout),
        rollout_id=rollout, name=name, start_ns=1, end_ns=2,
        attributes={} if agent is None else {AGENT_NAME: agent},
    )  # fmt: skip


def span_id(name: str, rollout: str) -> str:
    return (rollout + name)[:8].encode().hex().zfill(16)


def attempt(rollout: str, reward: float) -> list[Event]:
    """Three agents of a teacher: one says its name, one is named by its span, one by the rollout;
    the second asks for a model of its own."""
    return [
        RolloutStarted(rollout_id=rollout, task_id="t", agent="reviewer", opened_at=1000.0),
        text_turn("plan", rollout, said("a"), agent_name="planner"),
        text_turn(
            "code",
            rollout,
            said("b"),
            parent_span_id=span_id("code", rollout),
            asked_model="coder-model",
        ),
        text_turn("review", rollout, said("c"), parent_span_id=span_id("check", rollout)),
        span("code", rollout, "coder"),
        span("check", rollout, None),
        Reward(rollout_id=rollout, value=reward, created_at=1000.0),
        RolloutFinished(rollout_id=rollout, finished_at=1060.0),
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return char_model(tmp_path_factory.mktemp("selection") / "model")


def data(model: Path, folder: Path, batches: dict[str, list[str]], preset: str = "sft") -> SftData:
    with store_at(folder) as store:
        store.append([*attempt("good", 1.0), *attempt("bad", 0.0)])
        asked = settings(
            model,
            folder,
            preset=preset,
            held_out=0,
            batches={"tokens_per_micro_batch": 256, **batches},
        )
        writer = partial(load_reply_tokenizer, model)
        compared = asked.compares_rollouts
        chosen = choose_examples(store, asked.rollout_filter, writer=writer, compared=compared)
    return build_data(chosen, asked)


def learnt(found: SftData) -> set[str]:
    rows = [row for unit in found.train for row in unit.rows]
    return {TOKENIZER.decode(row.input_ids[row.keep]).removesuffix("<|im_end|>") for row in rows}


@pytest.mark.parametrize(
    ("batches", "names"),
    [
        ({}, {"plan", "code", "review"}),
        ({"agents": ["planner"]}, {"plan"}),
        ({"agents": ["!planner"]}, {"code", "review"}),
        ({"agents": ["coder"]}, {"code"}),
        ({"agents": ["!reviewer"]}, {"plan", "code"}),
        ({"models": ["coder-model"]}, {"code"}),
        ({"models": ["!coder-model"]}, {"plan", "review"}),
        ({"span_paths": ["check"]}, {"review"}),
    ],
)
def test_a_turn_of_text_is_selected_as_the_one_that_was_recorded(
    model: Path, tmp_path: Path, batches: dict[str, list[str]], names: set[str]
) -> None:
    found = data(model, tmp_path, batches)
    assert learnt(found) == names
    assert found.reasons["turns: turn_not_selected"] == 2 * (3 - len(names))
    assert found.unmatched == []


@pytest.mark.parametrize("preset", ["dpo", "kto"])
def test_so_it_is_where_rollouts_are_compared(model: Path, tmp_path: Path, preset: str) -> None:
    found = data(model, tmp_path, {"agents": ["!reviewer"]}, preset)
    assert learnt(found) == {"plan", "code"}


def test_a_pattern_that_fits_no_turn_is_said_where_the_data_is(model: Path, tmp_path: Path) -> None:
    counts = data_counts(data(model, tmp_path, {"agents": ["planner", "!reviwer"]}))
    line = "batches.agents = '!reviwer' fits no turn; there are: 'coder', 'planner', 'reviewer'"
    assert counts["unmatched"] == [line]
    assert line in format_record({"event": "data", **counts})


def test_where_it_leaves_nothing_to_learn_the_error_says_so(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none has a turn.*; batches.agents = 'plannr' fits no"):
        data(model, tmp_path, {"agents": ["plannr"]})
