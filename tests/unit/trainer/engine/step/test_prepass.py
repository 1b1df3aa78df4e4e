"""What is looked at before a step's first gradient, and what a step says of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from support.trainer import layout_ranks
from support.trainer.forward_checks import alone
from support.trainer.fsdp_ranks import VERSION
from support.trainer.layout_ranks import Layout, made, others, share
from support.trainer.learners import build
from support.trainer.row_samples import VOCABULARY, Group, Sample, rows, turn
from support.trainer.tiny_model import tiny_sizes
from tracegrad_trainer.batches import BatchSettings, micro_batch, mismatched_rows, pack, select
from tracegrad_trainer.engine import Learner, OptimSettings
from tracegrad_trainer.engine.flops import flops
from tracegrad_trainer.engine.model.forward import TargetContext
from tracegrad_trainer.engine.step import prepass as prepass_module
from tracegrad_trainer.engine.step.prepass import kto_z, prepass
from tracegrad_trainer.losses import compute_advantages, preset

pytestmark = pytest.mark.usefixtures("one_rank")


def row_logprobs(folder: Path, row: Any) -> Tensor:
    """A row's targets by transformers alone."""
    with torch.no_grad():
        return alone(AutoModelForCausalLM.from_pretrained(folder), row).float()


def before(name: str, learner: Learner, batches: Any, objective: Any = None) -> list[Any]:
    engine = learner.engine
    return prepass(
        engine,
        objective or learner.objective,
        engine.inputs(batches),
        [TargetContext()] * len(batches),
        others(name, Layout()),
    )


def test_the_reference_is_the_other_model(folder: Path) -> None:
    learner = layout_ranks.learner(folder, "dpo")
    batches = share("dpo", Layout())
    everything = made("dpo")
    for batch, known in zip(batches, before("dpo", learner, batches), strict=True):
        for number, key in enumerate(batch.row_keys.tolist()):
            expected = row_logprobs(folder / "other", everything[key])
            found = known.reference_logprobs[torch.from_numpy(batch.row == number)]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    reference = learner.engine.reference
    assert reference is not None
    assert not any(p.requires_grad for p in reference.model.parameters())


def test_under_adapters_the_base_is_the_reference(folder: Path) -> None:
    objective = preset("grpo", kl="k3", kl_coef=0.1)
    learner = build(folder / "model", objective, fsdp={"lora": {"rank": 2}})
    with torch.no_grad():
        for name, parameter in learner.model.named_parameters():
            if ".lora_B." in name:
                parameter.to_local().normal_(std=0.3)  # type: ignore[attr-defined]
    batches = share("grpo", Layout())
    known = before("grpo", learner, batches)
    plain = layout_ranks.learner(folder, "turn_mean")
    for one, mine, base in zip(
        known, learner.logprobs(batches), plain.logprobs(batches), strict=True
    ):
        torch.testing.assert_close(one.reference_logprobs, base, rtol=1e-5, atol=1e-5)
        assert (mine - base).abs().mean() > 0.05
    assert learner.train(batches, version=VERSION).metrics["kl_loss"] > 0


def test_what_an_objective_needs_must_be_there(folder: Path) -> None:
    with pytest.raises(ValueError, match="reference policy: give its model's folder"):
        build(folder / "model", "dpo")
    one = build(folder / "model")
    with pytest.raises(ValueError, match="put a value head on"):
        Learner(one.model, one.mesh, preset("ppo"), OptimSettings())


def test_kto_z_is_the_mean_gain_of_mismatched_rollouts_and_never_negative(folder: Path) -> None:
    """Two rows a rollout, in whatever micro-batches: a rollout's gain is their sum."""
    learner = layout_ranks.learner(folder, "kto")
    looked_at = sorted(mismatched_rows(made("kto"), limit=100), key=lambda row: row.rollout_id)
    model, reference = layout_ranks.models(folder, "kto")
    gains = [float((row_logprobs(model, r) - row_logprobs(reference, r)).sum()) for r in looked_at]

    def z(number: list[int]) -> float:
        chosen = pack([looked_at[i] for i in number], ranks=1, budget=100)[0]
        with torch.no_grad():
            return float(kto_z(learner.engine, learner.engine.inputs(chosen)))

    def expected(number: list[int]) -> float:
        rollouts = {looked_at[i].rollout_id for i in number}
        return max(0.0, sum(gains[i] for i in number) / len(rollouts))

    up = [i for i, gain in enumerate(gains) if gain > 0]
    down = [i for i, gain in enumerate(gains) if gain < 0]
    every = list(range(len(looked_at)))
    assert len({row.rollout_id for row in looked_at}) < len(looked_at)
    for chosen in (up, down, every, [*up, down[0]]):
        assert z(chosen) == pytest.approx(expected(chosen), rel=1e-4, abs=1e-4)
    assert z(down) == z([]) == 0
    assert z(every) > 1, "what test_layout_invariance compares"


def test_a_mismatched_row_that_is_not_finite_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = layout_ranks.learner(folder, "kto").engine
    looked_at = mismatched_rows(made("kto"), limit=100)
    reference = prepass_module.reference_logprobs

    def z(number: list[int]) -> float:
        with torch.no_grad():
            [batch] = pack([looked_at[i] for i in number], ranks=1, budget=1000)[0]
            return float(kto_z(engine, engine.inputs([batch])))

    def spoilt(*given: Any) -> list[Tensor]:
        [found] = reference(*given)
        return [found.index_fill(0, torch.tensor([0]), torch.nan)]  # of the first row

    best = sorted(range(len(looked_at)), key=lambda i: z([i]))[-3:]
    first, *rest = sorted(best, key=lambda i: -len(looked_at[i]))  # as they are packed
    expected = z(rest)
    monkeypatch.setattr(prepass_module, "reference_logprobs", spoilt)
    assert z([first, *rest]) == pytest.approx(expected, rel=1e-4)
    assert expected > 0


def test_advantages_follow_values_and_rewards_along_each_rollout(folder: Path) -> None:
    """Two rows each, in several micro-batches; the rollout's reward is given once, at its end."""
    learner = layout_ranks.learner(folder, "ppo")
    batches = share("ppo", Layout())
    objective = preset("ppo", whiten=False, gamma=0.9, gae_lambda=0.5)
    found: dict[str, list[tuple[Any, ...]]] = {}
    for batch, known in zip(batches, before("ppo", learner, batches, objective), strict=True):
        each = [known.old_value, known.advantage, known.returns]
        value, advantage, returns = (x.double().tolist() for x in each)
        assert np.ptp(value) > 0.1
        for t, row in enumerate(batch.row_keys[batch.row].tolist()):
            order = (batch.turn_number[t], row, batch.target[t])
            numbers = (batch.reward[t], batch.score[t], value[t], advantage[t], returns[t])
            found.setdefault(f"r{row // 2}", []).append((order, *numbers))
    assert len(found) == 6
    for tokens in found.values():
        tokens.sort(key=lambda one: one[0])
        running, following = 0.0, 0.0
        for i, (_, reward, score, value, advantage, returns) in enumerate(reversed(tokens)):
            delta = reward + (score if i == 0 else 0) + 0.9 * following - value
            running = delta + 0.9 * 0.5 * running
            following = value
            assert advantage == pytest.approx(running, rel=1e-4, abs=1e-5)
            assert returns == pytest.approx(running + value, abs=1e-4)


def test_whitened_advantages_have_mean_0_and_variance_1_over_the_whole_step(
    folder: Path,
) -> None:
    learner = layout_ranks.learner(folder, "ipa")
    objective = preset("ipa", whiten=True)
    batches = share("ipa", Layout())
    assert len(batches) > 1
    known = before("ipa", learner, batches, objective)
    found = np.concatenate([k.advantage.numpy() for k in known])
    given = np.concatenate([b.advantage for b in batches])
    expert = np.concatenate([b.demonstration for b in batches])
    assert expert.any()
    np.testing.assert_array_equal(found[expert], given[expert])
    sampled = given[~expert].astype(np.float64)
    expected = (sampled - sampled.mean()) / sampled.std()
    np.testing.assert_allclose(found[~expert], expected, rtol=1e-5, atol=1e-6)


def test_reinforce_plus_plus_whitens_what_is_trained(folder: Path) -> None:
    """Of three groups one has equal rewards and is dropped: it has no part in the deviation."""
    objective = preset("reinforce++")
    learner = build(folder / "model", objective)
    rewards = {"a": (0.0, 1.0), "equal": (1.0, 1.0), "b": (0.0, 5.0)}
    groups = [
        Group(task, [_rollout(f"{task}{i}", reward, 4 + 3 * i) for i, reward in enumerate(two)])
        for task, two in rewards.items()
    ]
    chosen = select(
        groups,
        BatchSettings(),
        advantages=lambda some: compute_advantages(objective, some, {}),
        current_version=1,
    )
    assert set(chosen.skipped.values()) == {"equal_reward"}
    batches = pack(chosen.rows, ranks=1, budget=20)[0]
    inputs = learner.engine.inputs(batches)
    known = prepass(learner.engine, objective, inputs, [TargetContext()] * len(batches), ())
    found = torch.cat([k.advantage for k in known if k.advantage is not None]).double()
    assert float(found.mean()) == pytest.approx(0, abs=1e-6)
    assert float(found.std(unbiased=False)) == pytest.approx(1, abs=1e-6)
    assert len(batches) > 1


def _rollout(name: str, reward: float, tokens: int) -> Sample:
    return Sample(name, reward, [turn(name, [1, 2], list(range(3, 3 + tokens)))])


def test_a_look_leaves_no_whole_parameters_behind(folder: Path) -> None:
    learner = layout_ranks.learner(folder, "grpo")
    batches = share("grpo", Layout())
    first = learner.logprobs(batches)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.to_local().mul_(0.5)  # type: ignore[attr-defined]
    again = learner.logprobs(batches)
    assert max(float((a - b).abs().max()) for a, b in zip(first, again, strict=True)) > 0.1


def step_with_gap(
    folder: Path,
    apart: float,
    *,
    version: int = VERSION,
    dtype: Any = "float32",
    serving: Any = "float32",
) -> Any:
    """A step on tokens whose log-probabilities were recorded `apart` from the trainer's."""
    layout = Layout(settings={"compute_dtype": dtype})
    learner = layout_ranks.learner(folder, "turn_mean", layout, serving=serving)
    batches = [
        replace(batch, rollout_logprobs=logp.numpy() + np.float32(apart))
        for batch, logp in zip(
            share("grpo", layout), learner.logprobs(share("grpo", layout)), strict=True
        )
    ]
    return learner.train(batches, version=version)


def test_engines_that_disagree_after_a_push_are_loud(folder: Path) -> None:
    quiet, loud = step_with_gap(folder, 0.0), step_with_gap(folder, 0.01)
    assert (quiet.mismatch, quiet.metrics["mismatch"]) == (None, 0)
    assert quiet.metrics["gap_mean"] < 1e-6
    assert loud.metrics["mismatch"] == 1
    assert loud.applied
    assert loud.metrics["gap_p50"] == pytest.approx(0.01, rel=0.1)
    assert loud.metrics["gap_p99"] == pytest.approx(0.01, rel=0.1)
    assert "differ by 0.01 nats in the median (allowed 0.0001)" in loud.mismatch
    assert "more than float32 rounds" in loud.mismatch
    assert "\n" not in loud.mismatch


def test_older_versions_may_disagree(folder: Path) -> None:
    assert step_with_gap(folder, 0.5, version=VERSION + 5).mismatch is None


@pytest.mark.parametrize(
    ("dtype", "serving", "right", "wrong"),
    [
        ("bfloat16", "float32", 0.03, 0.08),
        ("float32", "bfloat16", 0.03, 0.08),  # 0.008 nats are no fault of a trainer in float32
        ("bfloat16", "fp8", 0.12, 0.3),
    ],
)
def test_the_coarser_engine_is_given_its_rounding(
    folder: Path, dtype: str, serving: str, right: float, wrong: float
) -> None:
    quiet = step_with_gap(folder, right, dtype=dtype, serving=serving)
    loud = step_with_gap(folder, wrong, dtype=dtype, serving=serving)
    assert (quiet.mismatch, quiet.metrics["mismatch"]) == (None, 0)
    assert right / 1.2 < quiet.metrics["gap_p50"] < quiet.metrics["gap_p50_bound"]
    assert loud.metrics["mismatch"] == 1
    assert loud.metrics["gap_p50"] > loud.metrics["gap_p50_bound"]


def test_tf32_is_given_the_rounding_of_bfloat16(folder: Path) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        assert step_with_gap(folder, 0.03).mismatch is None
    finally:
        torch.set_float32_matmul_precision("highest")
    assert step_with_gap(folder, 0.03).mismatch is not None


def test_a_step_says_how_much_it_was_and_how_long_it_took(folder: Path) -> None:
    learner = layout_ranks.learner(folder, "grpo")
    result = learner.train(share("grpo", Layout()), version=VERSION)
    assert result.metrics["tokens"] == sum(len(row) for row in made("grpo"))
    stages = {"prepass", "forward_backward", "apply"}
    assert set(result.speed) == stages | {"tokens_per_second"}
    seconds = sum(result.speed[stage] for stage in stages)
    assert all(result.speed[stage] > 0 for stage in stages)
    assert result.speed["tokens_per_second"] == pytest.approx(result.metrics["tokens"] / seconds)


def test_flops_are_those_that_torch_counts(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    (row,) = rows(1)
    batch = micro_batch([row], [0])
    ids = torch.from_numpy(batch.input_ids)
    with FlopCounterMode(display=False) as counted:
        logits = model(input_ids=ids, logits_to_keep=torch.from_numpy(batch.source)).logits
        logits.sum().backward()
    length, config = batch.tokens, model.config
    # torch counts all of L x L scores; of a causal row no more than half of them is needed, and
    # of the embedding's outputs the first layer needs no gradient but the table's.
    scores = 12 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    surplus = scores * (length * length - length * (length + 1) / 2)
    assert flops(model, batch) == pytest.approx(counted.get_total_flops() - surplus, rel=0.01)


def test_frozen_weights_and_idle_experts_cost_less(folder: Path) -> None:
    batch = micro_batch(rows(2), range(2))
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
    whole = flops(model, batch)
    model.requires_grad_(False)
    frozen = flops(model, batch)
    assert 0.6 < frozen / whole < 0.75
    mixture = {"num_experts": 8, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    config = Qwen3MoeConfig(**tiny_sizes(VOCABULARY, head_dim=8, **mixture))

    def experts(used: int) -> float:
        config.num_experts_per_tok = used
        return flops(AutoModelForCausalLM.from_config(config), batch)

    # Each expert: three matrices of 32 x 16, six operations a weight and token.
    assert experts(4) - experts(2) == pytest.approx(2 * 3 * 32 * 16 * 6 * batch.tokens)


def test_a_reference_is_built_without_adapters(folder: Path) -> None:
    adapted = {"lora": {"rank": 2}, "reshard": False}
    learner = build(folder / "model", "dpo", fsdp=adapted, reference=folder / "other")
    assert learner.engine.reference is not None
    assert not any("lora" in name for name, _ in learner.engine.reference.model.named_parameters())
    batches = share("dpo", Layout())
    (known, *_) = before("dpo", learner, batches)
    theirs = layout_ranks.learner(folder, "dpo")
    (expected, *_) = before("dpo", theirs, batches)
    torch.testing.assert_close(known.reference_logprobs, expected.reference_logprobs)
