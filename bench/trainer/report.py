"""The run as a page of Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.tables import goal_table, markdown, number
from bench.trainer.building import Building
from bench.trainer.goals import goals
from bench.trainer.head import HIDDEN, HeadMemory
from bench.trainer.rounds import Steps
from bench.trainer.work import OURS, PLAIN, TRL_CALL, TRL_ROLLOUT

_INTRODUCTION = f"""\
# What training costs

Written by `make bench-trainer`; do not edit. All train the same model on the same turns, in
float32 with the same number of threads, each in a process of its own, in turns; a step is the
loss and the gradients of all rollouts, and one of AdamW. The objective is what all of them have:
PPO's clip, a mean over all tokens, no mismatch correction, no reference.

- **{OURS}**: `Learner.train` on one rank, with its packing and all of its diagnostics.
- **{PLAIN}**: the plainest PyTorch that is right: `transformers`, a rollout at a time, all logits.
- **{TRL_ROLLOUT}**: `training_step` of TRL's `GRPOTrainer`, without
  generation, with its defaults but for activation checkpointing, which is off. It gets a rollout
  as its own tool loop makes it: the first prompt, and all that follows as one completion with a
  mask, padded.
- **{TRL_CALL}**: the same with the calls as they were captured: a row each, with its
  whole prompt.

Before anything is timed, all do one step of the same weights, and their gradients are compared.
"""
_STEPS = """\
Medians of the rounds. Tokens are those of the rollouts that no earlier turn has, for all alike,
whatever a peer makes of them. *Times ours* is how much longer a step takes, in the same round.
Memory is the process's, with whatever its libraries take: with model and optimizer before the
first step, and at most in the rounds, when AdamW's two moments are there. *Apart* is how far its
gradient is from the plain loop's, relative to that one's length.
"""
_BUILDING = """\
Turns with their tokens, as the store loads them, through filters and advantages into rows, packed
and shared out over two ranks.
"""
_HEAD = f"""\
Forward and backward from hidden states ({HIDDEN} wide) to log-probabilities, MB over the inputs
and their gradients. Where all logits do not fit beside everything else, they are not tried.
"""


def page(
    *,
    made: Sequence[str],
    machine: Sequence[str],
    steps: Sequence[Steps],
    buildings: Sequence[Building],
    heads: Sequence[HeadMemory],
) -> str:
    return "\n".join(
        [
            _INTRODUCTION,
            "\n".join(f"- {line}" for line in (*made, *machine)) + "\n",
            "## Goals\n",
            goal_table(goals(steps, buildings, heads)),
            "## Steps\n",
            _STEPS,
            *(_steps(one) for one in steps),
            "## Building batches\n",
            _BUILDING,
            _buildings(buildings),
            "## The head's memory\n",
            _HEAD,
            _heads(heads),
        ]
    )


def _steps(steps: Steps) -> str:
    header = ["", "s a step", "tokens/s", "times ours", "MB before", "MB at most", "apart"]
    rows = [
        [
            name,
            number(statistics.median(seconds)),
            number(steps.tokens_per_s(name)),
            f"{steps.times(name):.2f}",
            number(steps.memory[name].before / 1e6),
            number(steps.memory[name].peak / 1e6),
            f"{steps.apart[name]:.0e}",
        ]
        for name, seconds in steps.seconds.items()
    ]
    rounds = len(steps.seconds[OURS])
    return (
        f"{steps.shape.words}. {steps.rollouts} rollouts of {steps.tokens:,} tokens,"
        f" {steps.sampled:,} of them sampled; the calls together have {steps.tokens_by_call:,}."
        f" {rounds} round{'s' if rounds > 1 else ''}.\n\n{markdown(header, rows)}"
    )


def _buildings(buildings: Sequence[Building]) -> str:
    rows = [
        [
            one.shape.name,
            f"{one.rollouts:,}",
            f"{one.tokens:,}",
            number(one.seconds * 1e3),
            number(one.tokens_per_s),
        ]
        for one in buildings
    ]
    return markdown(["", "rollouts", "tokens", "ms", "tokens/s"], rows)


def _heads(heads: Sequence[HeadMemory]) -> str:
    rows = [
        [
            f"{one.tokens:,}",
            f"{one.vocabulary:,}",
            number(one.logits * 4 / 1e6),
            number(one.ours / 1e6),
            "" if one.plain is None else number(one.plain / 1e6),
        ]
        for one in heads
    ]
    return markdown(["tokens", "vocabulary", "MB of logits", OURS, "all logits"], rows)
