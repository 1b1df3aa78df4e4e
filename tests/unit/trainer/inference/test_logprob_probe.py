"""The tokens that a push is checked by, and the comparison of their log-probabilities."""

from __future__ import annotations

import math

import pytest

from support.engines.mock_engine import MockEngine
from support.proxy.servers import EngineServer, serving
from support.trainer.row_samples import rows
from tracegrad_trainer.inference.logprob_probe import (
    ProbeMismatchError,
    compare_logprobs,
    sample_probe,
    sample_probes,
)
from tracegrad_trainer.inference.publish import MAX_PROMPT_TOKENS, PROBE_PROMPTS, probe_prompts


def test_the_gap_is_measured_a_token() -> None:
    gap = compare_logprobs([-1.0, -2.0, -3.0], [-1.0, -2.1, -2.7], 0.5)
    assert gap.tokens == 3
    assert gap.max == pytest.approx(0.3)
    assert gap.p50 == pytest.approx(0.1)
    assert gap.mean == pytest.approx(0.4 / 3)


def test_one_token_above_the_tolerance_is_a_mismatch() -> None:
    with pytest.raises(ProbeMismatchError, match=r"up to 0\.5 nats .* allowed 0\.1") as error:
        compare_logprobs([-1.0, -2.0], [-1.0, -2.5], 0.1)
    assert error.value.gap.max == 0.5


def test_by_precision_quantiles_count_and_not_one_token() -> None:
    served, trained = [-1.0] * 200, [-1.01] * 199 + [-6.0]
    assert compare_logprobs(served, trained, "bfloat16").max == 5
    with pytest.raises(
        ProbeMismatchError, match=r"0\.01 nats in the median \(allowed 0\.0001\).*float32 rounds"
    ):
        compare_logprobs(served, trained, "float32")
    with pytest.raises(ProbeMismatchError, match="more than fp8 rounds"):
        compare_logprobs(served, [-1.3] * 200, "fp8")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("allowed", [10.0, "fp8"])
def test_what_is_not_a_number_never_agrees(bad: float, allowed: float) -> None:
    with pytest.raises(ProbeMismatchError):
        compare_logprobs([-1.0] * 300 + [bad], [-1.0] * 301, allowed)


@pytest.mark.parametrize(("served", "trained"), [([], []), ([-1.0], [])])
def test_nothing_or_unequal_numbers_of_tokens_cannot_be_compared(
    served: list[float], trained: list[float]
) -> None:
    with pytest.raises(ValueError, match="log-probabilities, trained"):
        compare_logprobs(served, trained, 1.0)


def test_all_prompts_are_sampled_in_one_call() -> None:
    server = EngineServer()
    server.engine = MockEngine()
    prompts = [[1, 2, 3], [4], [5, 6]]
    with serving(server, lifespan="off") as url:
        samples = sample_probes(url, prompts, tokens=8)
        assert [sample.prompt_token_ids for sample in samples] == prompts
        [request] = server.engine.requests
        assert (request["prompt"], request["max_tokens"]) == (prompts, 8)
        assert sample_probe(url, [7, 8], tokens=2).prompt_token_ids == [7, 8]


def test_prompts_are_beginnings_that_leave_room_for_what_is_sampled() -> None:
    made = rows(3)
    order = sorted(made, key=len, reverse=True)
    found = probe_prompts(made, None)
    assert len(found) == PROBE_PROMPTS
    assert found[:3] == [row.input_ids[:MAX_PROMPT_TOKENS].tolist() for row in order]
    assert found[0] == found[3]  # over again
    assert {len(prompt) for prompt in probe_prompts(made, 7)} == {7}
    assert {len(prompt) for prompt in probe_prompts(made, -5)} == {1}
    assert {len(prompt) for prompt in probe_prompts([], None)} == {24}
    assert {len(prompt) for prompt in probe_prompts([], 7)} == {7}
