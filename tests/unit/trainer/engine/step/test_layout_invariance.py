"""1, 2 and 4 ranks, any split, packed or padded: the same loss and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.trainer import layout_ranks
from support.trainer.fsdp_ranks import VERSION
from support.trainer.layout_ranks import (
    BATCHES,
    MEMORY_VARIANTS,
    MOMENTS,
    OBJECTIVES,
    VARIANTS,
    Layout,
    batch,
    objectives_of,
    resumed,
    run,
    share,
    trained,
    without,
)
from support.trainer.learners import apart, weights
from support.trainer.ranks import run_on_ranks

# Two jobs of several ranks, in the fixture of whichever test comes first.
pytestmark = pytest.mark.timeout(600)
EXACT = 1e-6
# A product over a rollout's tokens, some sixty, multiplies the roundings of their log-probabilities
# (half of 2^-21 each, for numbers up to 8 nats, of old and of mu).
PRODUCT = 60 * 2**-21
# A loss is a mean of terms of both signs, each of about the size of an advantage, 1, and rounded as
# its log-probability is: what is left of them may be much smaller than its rounding.
LOSS = 2**-22


@pytest.fixture(scope="module")
def one(folder: Path, one_rank: None) -> dict[str, Any]:
    return {name: run(folder, name) for name in OBJECTIVES}


@pytest.fixture(scope="module")
def several(folder: Path) -> dict[int, dict[str, Any]]:
    """What 2 and 4 ranks found."""
    found = {}
    for ranks in (4, 2):  # two load what four saved
        run_on_ranks(layout_ranks.main, ranks, folder)
        found[ranks] = torch.load(folder / f"{ranks}.pt", weights_only=False)
    return found


def same(found: Any, expected: Any, exact: float = EXACT) -> None:
    (result, gradients), (other, theirs) = found, expected
    assert result.applied
    assert other.applied
    assert apart(gradients, theirs) < exact
    assert list(result.metrics) == list(other.metrics)
    assert result.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=exact, abs=LOSS)
    assert result.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=exact)
    for name, number in result.metrics.items():
        assert number == pytest.approx(other.metrics[name], rel=1e-4, abs=1e-6), name


def exact(name: str) -> float:
    return PRODUCT if OBJECTIVES[name].correction_level == "sequence_product" else EXACT


EACH = [(name, ranks) for ranks in (2, 4) for name in objectives_of(ranks)]


@pytest.mark.parametrize(("name", "ranks"), EACH)
def test_any_number_of_ranks_gives_the_same(
    one: dict[str, Any], several: dict[int, dict[str, Any]], name: str, ranks: int
) -> None:
    same(several[ranks][name], one[name], exact(name))


@pytest.mark.parametrize(("name", "ranks"), [each for each in EACH if each[0] in BATCHES])
@pytest.mark.parametrize(
    "kind", ["batches", "shared batches", "grouped batches", "replicated batches"]
)
def test_any_number_of_ranks_learns_the_same_of_a_batch_of_several_steps(
    folder: Path,
    several: dict[int, dict[str, Any]],
    one_rank: None,
    name: str,
    kind: str,
    ranks: int,
) -> None:
    """Adam divides by its gradients' size: where that is 0, rounding is what moves."""
    (found, learnt), (expected, wanted) = several[ranks][kind][name], batch(folder, name)
    of_packing = ("micro_batches", "pack_fill", "pack_balance", "flops", "tokens")
    of_packing = (*of_packing, "ranks_a_micro_batch")
    for key, number in expected.metrics.items():
        if key not in of_packing:
            assert found.metrics[key] == pytest.approx(number, rel=1e-3, abs=1e-5), key
    assert found.metrics["updates"] == 4
    assert apart(learnt, wanted) < 1e-5
    # Groups of two are quicker where four ranks would wait for the longest row.
    alike = {"shared batches": 2, "grouped batches": ranks // 2}.get(kind, 1)
    assert found.metrics["ranks_a_micro_batch"] == alike


@pytest.mark.parametrize(("name", "ranks"), EACH)
def test_ranks_that_share_micro_batches_give_the_same(
    one: dict[str, Any], several: dict[int, dict[str, Any]], name: str, ranks: int
) -> None:
    """Two of them a micro-batch: one group, and two that have micro-batches of their own."""
    same(several[ranks]["shared"][name], one[name], exact(name))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("replicated", name) for name in ("grpo", "ppo", "dpo")), ("replicated, shared", "ppo")],
)
def test_ranks_that_hold_two_copies_of_the_model_give_the_same(
    one: dict[str, Any], several: dict[int, dict[str, Any]], kind: str, name: str, ranks: int
) -> None:
    same(several[ranks][kind][name], one[name])


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_checkpoint_of_two_copies_goes_on_with_one_and_two_ranks(
    folder: Path, several: dict[int, dict[str, Any]], one_rank: None, moments: str
) -> None:
    expected = trained(folder, Layout(), moments)
    expected.train(share("grpo", Layout()), version=VERSION)
    # Where a moment is about half way between two of bfloat16, float32's rounding decides.
    exact = 1e-5 if moments == "float32" else 1e-4
    found = [several[4]["resumed"], several[2]["resumed"], {moments: resumed(folder, moments)}]
    for each in found:
        assert apart(each[moments], weights(expected)) < exact


@pytest.mark.parametrize("budget", [84, 1000])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_any_split_gives_the_same(
    folder: Path, one: dict[str, Any], name: str, budget: int
) -> None:
    same(run(folder, name, Layout(budget=budget)), one[name], exact(name))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_padded_row_a_forward_gives_the_same(
    folder: Path, one: dict[str, Any], name: str
) -> None:
    padded = run(folder, name, Layout(padded=True, settings={"attention": "sdpa"}))
    expected, gradients = one[name]
    metrics = dict(expected.metrics)
    # Padding is computed, and counted: nothing else may differ.
    for counted in ("tokens", "flops"):
        assert padded[0].metrics[counted] > metrics[counted]
        padded[0].metrics[counted] = metrics[counted]
    same(padded, (expected, gradients), exact(name))


# Two ranks have "compiled" below: tracing takes most of its time.
@pytest.mark.parametrize("variant", [n for n in VARIANTS if n not in ("plain", "compiled")])
def test_where_memory_is_saved_the_numbers_are_the_same(
    folder: Path, one: dict[str, Any], variant: str
) -> None:
    same(run(folder, "ppo", VARIANTS[variant]), one["ppo"])


@pytest.mark.parametrize("variant", MEMORY_VARIANTS)
def test_where_two_ranks_save_memory_the_numbers_are_the_same(
    one: dict[str, Any], several: dict[int, dict[str, Any]], variant: str
) -> None:
    same(several[2][variant], one["ppo"])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_same_inputs_give_the_same_bits(folder: Path, one: dict[str, Any], name: str) -> None:
    result, gradients = run(folder, name)
    assert result == one[name][0]
    assert all(torch.equal(gradients[key], one[name][1][key]) for key in gradients)


@pytest.mark.parametrize("name", ["grpo", "ppo", "dpo"])
def test_a_row_with_an_infinite_log_probability_leaves_the_step(
    folder: Path, several: dict[int, dict[str, Any]], one_rank: None, name: str
) -> None:
    result, gradients = several[2]["poisoned"][name]
    gone = (4, 5) if name == "dpo" else (4,)  # its pair goes with it
    assert result.dropped == gone
    assert result.metrics["rows_dropped"] == len(gone)
    _, expected = without(folder, name, gone)
    assert apart(gradients, expected) < EXACT


def test_these_steps_exercise_what_they_are_about(one: dict[str, Any]) -> None:
    metrics = {name: result.metrics for name, (result, _) in one.items()}
    assert 0.05 < metrics["grpo"]["clipped_share"] < 0.95
    assert metrics["grpo"]["kl_loss"] > 0.01
    assert metrics["ppo"]["value_loss"] > 0.01
    assert metrics["ipa"]["demonstration_tokens"] > 10
    assert all(result.metrics["grad_norm"] > 1e-3 for result, _ in one.values())
    assert {"value_head.weight", "value_head.bias"} <= set(one["ppo"][1])
    assert float(one["ppo"][1]["value_head.weight"].norm()) > 1e-3
