"""Memory of the log-probabilities' head, at several sizes: a process each.

`python -m bench.trainer.head TOKENS VOCABULARY WHICH` prints bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.pages import ROOT
from bench.trainer.process import held, high_water
from tracegrad_trainer.engine.model.chunked_logprobs import chunked_logprobs

HIDDEN = 64
OURS, PLAIN = "tracegrad", "all logits"


@dataclass(frozen=True, slots=True)
class HeadMemory:
    """Bytes over the inputs and their gradients; None: not measured."""

    tokens: int
    vocabulary: int
    ours: int
    plain: int | None

    @property
    def logits(self) -> int:
        return self.tokens * self.vocabulary


def head_memory(sizes: Sequence[tuple[int, int]], *, plain_logits: int) -> list[HeadMemory]:
    """All logits are held up to `plain_logits` of them only: a machine has its limits."""
    return [
        HeadMemory(
            tokens,
            vocabulary,
            _measured(tokens, vocabulary, OURS),
            _measured(tokens, vocabulary, PLAIN) if tokens * vocabulary <= plain_logits else None,
        )
        for tokens, vocabulary in sizes
    ]


def _measured(tokens: int, vocabulary: int, which: str) -> int:
    command = [sys.executable, "-m", __name__, str(tokens), str(vocabulary), which]
    return int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def _extra(tokens: int, vocabulary: int, which: str) -> int:
    """Forward and backward of a head's log-probabilities, with a gradient of hidden states and
    weight."""
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(vocabulary, HIDDEN, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    # What a product needs is made by the first one.
    torch.autograd.grad((hidden[:8] @ weight[:8].T).sum(), (hidden, weight))
    before = held()
    found = torch.autograd.grad(_logp(hidden, weight, labels, which).sum(), (hidden, weight))
    gradients = sum(x.numel() * x.element_size() for x in found)
    return high_water() - before - gradients


def _logp(hidden: Tensor, weight: Tensor, labels: Tensor, which: str) -> Tensor:
    if which == OURS:
        return chunked_logprobs(hidden, weight, None, labels, None)[0]
    logits = hidden @ weight.T
    return torch.log_softmax(logits, -1).gather(-1, labels[:, None])[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", type=int)
    parser.add_argument("vocabulary", type=int)
    parser.add_argument("which", choices=(OURS, PLAIN))
    options = parser.parse_args()
    print(_extra(options.tokens, options.vocabulary, options.which))


if __name__ == "__main__":
    main()
