"""Steps of a real model: a rollout's turns in one row, or each in a row of its own that repeats
what came before it, give every token the same gradient; and so do several optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.trainer.batch_samples import Rollout, source_of
from support.trainer.fsdp_ranks import VERSION, step
from support.trainer.layout_ranks import OBJECTIVES, Layout, learner, made, others
from support.trainer.learners import apart, weights
from support.trainer.row_samples import VOCABULARY, turn
from tracegrad_trainer.batches import Row, pack
from tracegrad_trainer.batches.rows import RowSource, path_rows
from tracegrad_trainer.batches.tree_rows import tree_rows
from tracegrad_trainer.engine import train_batch
from tracegrad_trainer.engine.model.forward import TargetContext
from tracegrad_trainer.engine.step.rollout_sums import with_rollout_sums
from tracegrad_trainer.losses import Tokens, preset
from tracegrad_trainer.losses.tokens import rollout_mean

pytestmark = pytest.mark.usefixtures("one_rank")


def rollouts(name: str) -> list[Row]:
    """Six rows of two turns, a rollout each; pairs of short ones."""
    found = made(name)[:12:2]
    for i, row in enumerate(found):
        changes: dict[str, Any] = {"rollout_id": f"r{i}", "turn_numbers": (0, 1)}
        if row.label:
            changes["label"] = 1 - 2 * (i % 2)
        if row.pair >= 0:
            changes["pair"] = i // 2
        found[i] = replace(row, **changes)
    return found


def by_turn(rows: Sequence[Row]) -> list[Row]:
    """Each turn in a row of its own, with the tokens before it as its context."""
    found = []
    for row in rows:
        for number in (0, 1):
            here = row.turn_index == number
            end = int(np.flatnonzero(here)[-1]) + 1
            cut: dict[str, Any] = {"input_ids": row.input_ids[:end]}
            for field in ("rollout_logprobs", "advantage", "reward"):
                cut[field] = np.where(here, getattr(row, field), 0)[:end].astype(np.float32)
            found.append(
                replace(
                    row,
                    **cut,
                    loss_mask=here[:end],
                    keep=here[:end],
                    policy_version=np.where(here, row.policy_version, -1)[:end].astype(np.int32),
                    turn_index=np.where(here, 0, -1)[:end].astype(np.int32),
                    temperature=np.where(here, row.temperature, 1)[:end].astype(np.float32),
                    demonstration=(row.demonstration & here)[:end],
                    turn_ids=(row.turn_ids[number],),
                    turn_numbers=(number,),
                )
            )
    return found


def one_step(folder: Path, name: str, rows: list[Row], budget: int) -> Any:
    """(StepResult, gradients), where the policy is not quite the old one: by token, not by row."""
    one = learner(folder, name)
    batches = pack(rows, ranks=1, budget=budget)[0]
    known = []
    for batch, logp in zip(batches, one.logprobs(batches), strict=True):
        off = 0.2 * np.cos(
            batch.input_ids[0, batch.target] * 7.0 + batch.position_ids[0, batch.target]
        )
        known.append(TargetContext(old_logprobs=logp + torch.from_numpy(off).float()))
    looked_at = others(name, Layout())
    return step(one, batches, before=known, mismatched=looked_at)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_is_blind_to_rows(folder: Path, name: str) -> None:
    chained, split = rollouts(name), by_turn(rollouts(name))
    budget = 120 if name == "dpo" else 60  # the rows of a pair are in one micro-batch
    result, expected = one_step(folder, name, chained, 200)
    found, gradients = one_step(folder, name, split, budget)
    assert apart(gradients, expected) < 1e-5
    for metric, value in result.metrics.items():
        if metric not in ("tokens", "flops"):
            assert found.metrics[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric


@pytest.mark.parametrize("name", ["gspo", "rloo", "ppo"])
def test_a_batch_of_several_steps_is_blind_to_rows(folder: Path, name: str) -> None:
    """Two parts, twice: from the second on the policy is not what the batch began with."""
    learnt = []
    for rows in (rollouts(name), by_turn(rollouts(name))):
        one = learner(folder, name, lr=1e-3, minibatches=2, epochs=2)
        done = train_batch(one, rows, version=VERSION, budget=60)
        assert done.metrics["updates"] == 4
        learnt.append(weights(one))
    assert apart(learnt[1], learnt[0]) < 1e-5


def forked(number: int) -> RowSource:
    """A rollout of three turns, two of which continue the first; one turn has a reward."""
    rng = np.random.default_rng(number)

    def ids(count: int) -> list[int]:
        return rng.integers(0, VOCABULARY - 1, count).tolist()

    a = turn(f"{number}.a", ids(4), ids(3 + number))
    b = turn(f"{number}.b", ids(2), ids(4), parent=a)
    c = turn(f"{number}.c", ids(3), ids(5), parent=a)
    rollout = Rollout(f"r{number}", 1.0 - number, [a, b, c], turn_rewards={1: 0.5})
    return source_of(rollout, f"g{number // 2}", [1.5 - number] * 3)


@pytest.mark.parametrize("name", ["gspo", "rloo", "topr", "ppo"])
def test_a_tree_is_as_good_as_its_paths(folder: Path, name: str) -> None:
    sources = [forked(number) for number in range(4)]
    trees = [row for source in sources for row in tree_rows(source, limit=100)[0]]
    paths = [row for source in sources for row in path_rows(source)]
    assert (len(trees), len(paths)) == (4, 8)
    _, expected = one_step(folder, name, trees, 200)
    _, gradients = one_step(folder, name, paths, 20)
    assert apart(gradients, expected) < 1e-5


def test_a_forward_is_made_only_where_rollouts_are_split(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of these the policy's log-probabilities have to be known before the first backward."""
    one, asked = learner(folder, "gspo"), []
    forward = "tracegrad_trainer.engine.step.rollout_sums.forward"

    def counted(model: Any, inputs: Any, head: Any, values: bool) -> Any:
        asked.append(inputs)
        return real(model, inputs, head, values=values)

    from tracegrad_trainer.engine.step import rollout_sums

    real = rollout_sums.forward
    monkeypatch.setattr(forward, counted)

    def sums(objective: str, rows: list[Row], **known: Any) -> list[TargetContext]:
        batches = pack(rows, ranks=1, budget=60)[0]
        logp = one.logprobs(batches)
        before = [TargetContext(**dict.fromkeys(known, value)) for value in logp]
        inputs = one.engine.inputs(batches)
        return with_rollout_sums(one.engine, OBJECTIVES[objective], inputs, before)

    split = by_turn(rollouts("gspo"))
    for objective, rows in (("grpo", split), ("gspo", rollouts("gspo"))):
        assert all(found.rollout_sums is None for found in sums(objective, rows))
    assert not asked
    assert all(
        found.rollout_sums is not None for found in sums("gspo", split, current_logprobs=True)
    )
    assert not asked
    assert all(found.rollout_sums is not None for found in sums("gspo", split))
    assert len(asked) > 1


def by_uncertainty(tokens: Tokens, ratio: Tensor, settings: Any) -> tuple[Tensor, Tensor]:
    """Of a user: what the policy is unsure of over a whole rollout counts more, so does what the
    critic makes too little of."""
    assert tokens.entropy is not None
    assert tokens.value is not None
    weight = rollout_mean(tokens.entropy, tokens) + rollout_mean(tokens.value, tokens).abs()
    loss = -weight[tokens.rollout] * tokens.advantage * tokens.policy_logprobs
    return loss, torch.zeros_like(tokens.demonstration)


def test_what_a_part_of_ones_own_sums_is_of_the_policy_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step on a batch, when log-probabilities are known already, and behind it."""
    own = preset("ppo", surrogate=f"{__name__}:by_uncertainty", entropy_coef=0.01, value_clip=None)
    monkeypatch.setitem(OBJECTIVES, "own", own)
    learnt = []
    for rows in (rollouts("own"), by_turn(rollouts("own"))):
        one = learner(folder, "own", lr=1e-3, epochs=2)
        train_batch(one, rows, version=VERSION, budget=60)
        learnt.append(weights(one))
    assert apart(learnt[1], learnt[0]) < 1e-5


def test_a_rollout_with_a_row_that_is_not_finite_leaves_whole(folder: Path) -> None:
    """What is left of it has no ratio of its own."""
    rows = by_turn(rollouts("gspo"))
    rows[4].rollout_logprobs[rows[4].keep.argmax()] = -np.inf
    done, _ = one_step(folder, "gspo", rows, 60)
    assert done.dropped == (4, 5)
    token_level, _ = one_step(folder, "grpo", rows, 60)
    assert token_level.dropped == (4,)
