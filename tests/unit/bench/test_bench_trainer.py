"""What the trainer's benchmark compares: the same turns, the same numbers, the same gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.trainer.head import head_memory
from bench.trainer.model import Size, write_model
from bench.trainer.plain import Plain, sequence
from bench.trainer.process import running
from bench.trainer.rollouts import LONG, MIXED, Shape, tasks
from bench.trainer.rounds import agreement, measure
from bench.trainer.trl_loop import TrlRow, _calls, _padded, _whole
from bench.trainer.work import OURS, PLAIN, Work, distance, gradients

SMALL = Size(128, 64, 1)
SHAPE = Shape("small", (1, 3), (3, 9), (2, 6), (1, 5))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    folder = write_model(SMALL, tmp_path_factory.mktemp("model") / "model")
    return Work(tasks(SHAPE, 2, 3, SMALL.vocabulary), folder, 64, 2)


@pytest.mark.parametrize("shape", [LONG, MIXED])
def test_rollouts_are_within_their_shape_and_only_append(shape: Shape) -> None:
    for task in tasks(shape, 3, 4, 512):
        assert len({tuple(attempt.turns[0].prompt_token_ids) for attempt in task.rollouts}) == 1
        assert len({attempt.reward for attempt in task.rollouts}) == 4
        for attempt in task.rollouts:
            assert shape.turns[0] <= len(attempt.turns) <= shape.turns[1]
            lengths = [len(turn.completion_token_ids) for turn in attempt.turns]
            assert shape.sampled[0] <= min(lengths) <= max(lengths) <= shape.sampled[1]
            for before, turn in zip(attempt.turns, attempt.turns[1:], strict=False):
                context = before.prompt_token_ids + before.completion_token_ids
                assert turn.prompt_token_ids[: len(context)] == context
                said = len(turn.prompt_token_ids) - len(context)
                assert shape.said[0] <= said <= shape.said[1]
                assert turn.parent_id == before.turn_id


def test_rollouts_are_the_same_every_time() -> None:
    first, second = (tasks(MIXED, 2, 2, 512) for _ in range(2))
    assert [a.turns[-1].prompt_token_ids for t in first for a in t.rollouts] == [
        a.turns[-1].prompt_token_ids for t in second for a in t.rollouts
    ]


def test_tokens_are_counted_once_and_calls_with_their_prompts(work: Work) -> None:
    rows = [sequence(attempt) for attempt in work.attempts]
    assert work.tokens == sum(len(ids) for ids, _ in rows)
    assert work.sampled == sum(int(sampled.sum()) for _, sampled in rows)
    assert work.tokens_by_call > work.tokens


def test_advantages_are_those_of_the_group(work: Work) -> None:
    for task in work.tasks:
        values = [work.advantages[attempt.rollout_id] for attempt in task.rollouts]
        # Rewards 0, 1/3, 2/3: a deviation of 1/3.
        assert values == pytest.approx([-1, 0, 1], abs=1e-5)


def test_trl_gets_the_same_tokens_either_way(work: Work) -> None:
    for attempt in work.attempts:
        ids, sampled = sequence(attempt)
        [whole] = _whole(attempt, 0.5)
        assert torch.equal(torch.cat([whole.prompt, whole.completion]), ids)
        calls = _calls(attempt, 0.5)
        assert len(calls) == len(attempt.turns)
        assert torch.equal(torch.cat([row.completion for row in calls]), ids[sampled])
        assert torch.equal(whole.completion[whole.trained], ids[sampled])
        last = calls[-1]
        assert torch.equal(torch.cat([last.prompt, last.completion]), ids)


def test_trls_rows_are_padded_on_both_sides() -> None:
    def row(prompt: int, completion: int) -> TrlRow:
        trained = torch.arange(completion) > 0
        return TrlRow(torch.arange(1, prompt + 1), torch.arange(1, completion + 1), trained, 2.0)

    inputs = _padded([row(1, 3), row(2, 1)])
    assert inputs["prompt_ids"].tolist() == [[0, 1], [1, 2]]
    assert inputs["prompt_mask"].tolist() == [[0, 1], [1, 1]]
    assert inputs["completion_ids"].tolist() == [[1, 2, 3], [1, 0, 0]]
    assert inputs["completion_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert inputs["tool_mask"].tolist() == [[0, 1, 1], [0, 0, 0]]
    assert inputs["advantages"].tolist() == [2.0, 2.0]


def test_a_distance_is_relative_to_the_gradients_length() -> None:
    a, b = {"w": torch.tensor([3.0, 4.5])}, {"w": torch.tensor([3.0, 4.0])}
    assert distance(a, b) == pytest.approx(0.1)
    assert distance(b, b) == 0


def test_the_plain_loops_gradient_is_that_of_minus_the_mean_of_a_log_p(work: Work) -> None:
    peer = Plain(work)
    model = Plain(work).model
    total = torch.zeros(())
    for attempt in work.attempts:
        ids, sampled = sequence(attempt)
        logits = model(input_ids=ids[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        total = total + work.advantages[attempt.rollout_id] * loss[sampled[1:]].sum()
    torch.autograd.backward(total / work.sampled)
    expected = {name: p.grad for name, p in model.named_parameters()}
    loss, found = gradients(peer)
    assert distance(found, expected) < 1e-5  # type: ignore[arg-type]
    mean = sum(work.advantages[a.rollout_id] * a.sampled for a in work.attempts) / work.sampled
    assert loss == pytest.approx(-mean, abs=1e-6)


class Made:
    """A peer that is no process: its gradient is what it was given."""

    def __init__(self, name: str, loss: float, *gradient: float) -> None:
        self.name, self.loss, self.gradient = name, loss, torch.tensor(gradient)

    def gradients(self, file: Path) -> float:
        torch.save({"w": self.gradient}, file)
        return self.loss


@pytest.mark.parametrize(
    ("ours", "wrong"),
    [
        (Made(OURS, 0.5, 3.0, 4.001), r"tracegrad: its gradient is 2\.0e-04 from the plain loop's"),
        (Made(OURS, 0.5, 3.0, float("nan")), r"tracegrad: its gradient is nan"),
        (Made(OURS, 0.501, 3.0, 4.0), r"tracegrad: its loss is 0\.501, not 0\.5"),
    ],
)
def test_peers_that_do_not_agree_are_not_timed(ours: Made, wrong: str) -> None:
    with pytest.raises(RuntimeError, match=wrong):
        agreement([ours, Made(PLAIN, 0.5, 3.0, 4.0)])  # type: ignore[list-item]


def test_peers_agree_within_float32() -> None:
    made = [Made(OURS, 0.5, 3.0, 4.0001), Made(PLAIN, 0.5, 3.0, 4.0)]
    apart = agreement(made)  # type: ignore[arg-type]
    assert apart == {OURS: pytest.approx(2e-5, rel=1e-2), PLAIN: 0.0}


@pytest.mark.slow  # four processes, each with its libraries
def test_all_peers_do_the_same_step(work: Work) -> None:
    lines: list[str] = []
    steps = measure(SHAPE, work, rounds=1, threads=1, say=lines.append)
    assert max(steps.apart.values()) < 1e-5
    assert min(value for name, value in steps.apart.items() if name != PLAIN) > 0
    assert all(seconds[0] > 0 for seconds in steps.seconds.values())
    assert all(memory.peak > memory.before > 10**8 for memory in steps.memory.values())
    assert len(lines) == 2


@pytest.mark.slow
def test_a_peer_that_does_not_start_is_an_error(work: Work, tmp_path: Path) -> None:
    nowhere = Work(work.tasks, tmp_path / "nowhere", 64, 2)
    with pytest.raises(RuntimeError, match="plain loop did not start"), running(PLAIN, nowhere, 1):
        pass


@pytest.mark.slow
def test_the_heads_memory_is_measured_over_its_inputs() -> None:
    [small, large] = head_memory([(256, 8_192), (512, 16_384)], plain_logits=1 << 21)
    assert small.plain is not None
    # Logits and their softmax at least.
    assert small.plain >= 2 * 4 * small.logits
    assert large.plain is None, "more logits than were allowed"
    assert 0 < small.ours < 4 * small.plain
