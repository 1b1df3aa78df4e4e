"""Measuring steps: every peer in every round, in turns, so that drift hits all alike."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.trainer.process import Memory, Running, running
from bench.trainer.rollouts import Shape
from bench.trainer.work import OURS, PEERS, PLAIN, Work, distance

# Further apart than this, relative to the gradient's length, is not the same step in float32.
AGREEMENT = 1e-4


@dataclass(frozen=True, slots=True)
class Steps:
    """By peer: the seconds of each round's step, and the memory of its process."""

    shape: Shape
    rollouts: int
    tokens: int  # unique ones
    sampled: int
    tokens_by_call: int
    seconds: dict[str, Sequence[float]]
    memory: dict[str, Memory]
    apart: dict[str, float]  # its gradient from the plain loop's

    def tokens_per_s(self, peer: str) -> float:
        """Unique tokens of the rollouts, whatever the peer makes of them."""
        return self.tokens / statistics.median(self.seconds[peer])

    def times(self, peer: str) -> float:
        """How much longer the peer takes than ours, in the same round; the median of the rounds."""
        pairs = zip(self.seconds[peer], self.seconds[OURS], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def measure(
    shape: Shape, work: Work, *, rounds: int, threads: int, say: Callable[[str], None]
) -> Steps:
    """Raises RuntimeError where the peers do not do the same: nothing is timed then."""
    with ExitStack() as stack:
        peers = [stack.enter_context(running(name, work, threads)) for name in PEERS]
        apart = agreement(peers)
        say(f"{shape.name}: gradients at most {max(apart.values()):.1e} apart")
        seconds: dict[str, list[float]] = {name: [] for name in PEERS}
        for number in range(rounds):
            # Another one begins each time.
            first = number % len(peers)
            for peer in peers[first:] + peers[:first]:
                seconds[peer.name].append(peer.step())
            say(f"{shape.name}: " + ", ".join(f"{n} {s[-1]:.2f} s" for n, s in seconds.items()))
        return Steps(
            shape,
            len(work.attempts),
            work.tokens,
            work.sampled,
            work.tokens_by_call,
            dict(seconds),
            {peer.name: peer.memory() for peer in peers},
            apart,
        )


def agreement(peers: Sequence[Running]) -> dict[str, float]:
    """Everybody's first step, which also warms it up -> how far each is from the plain loop.

    Raises RuntimeError where one does something else.
    """
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as folder:
        files = {peer.name: Path(folder) / str(i) for i, peer in enumerate(peers)}
        losses = {peer.name: peer.gradients(files[peer.name]) for peer in peers}
        plain = torch.load(files[PLAIN])
        apart = {name: distance(torch.load(file), plain) for name, file in files.items()}
    for name, value in apart.items():
        if not value <= AGREEMENT:
            raise RuntimeError(f"{name}: its gradient is {value:.1e} from the plain loop's")
        if not abs(losses[name] - losses[PLAIN]) <= AGREEMENT * max(abs(losses[PLAIN]), 1e-2):
            raise RuntimeError(f"{name}: its loss is {losses[name]}, not {losses[PLAIN]}")
    return apart
