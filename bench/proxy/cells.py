"""What is measured: one cell a line of the tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, cycle

from bench.proxy.calls import PROMPTS, REPLY_TOKENS, Prompt
from bench.proxy.engine import Pace
from bench.proxy.load import Load, request
from bench.proxy.peers import DIRECT, LITELLM, LITELLM_TWO, OURS, OURS_TWO, PLAIN

PATH = "/v1/chat/completions"
ALL = (DIRECT, PLAIN, OURS, LITELLM)
WITHOUT_LITELLM = (DIRECT, PLAIN, OURS)
FEW = 16
# Of the time between two calls of a caller: tools run, people read.
PAUSED = 0.25
# Calls of one rollout, one after another: short, as agents' episodes are.
_CALLS_A_ROLLOUT = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """`rate`: calls a second that the engine gives, all callers together; None: it answers at
    once, and whatever is slowest is the limit. `tokens`: the callers ask for token ids and
    log-probabilities themselves, so that every server has the same answer to carry."""

    stream: bool
    prompt_tokens: int
    concurrency: int
    rate: float | None = None
    servers: tuple[str, ...] = ALL
    rounds: int = 3
    issue_s: float = 1.2
    limit_s: float = 12.0
    chunk_tokens: int = 1
    tokens: bool = False

    @property
    def answer_s(self) -> float:
        """How long the engine takes for one answer."""
        return self._call_s - self.pause_s

    @property
    def pause_s(self) -> float:
        """How long a caller waits, on average, before its next call. Without pauses all callers
        of an engine that takes equally long for every answer would end up in step: they call at
        once, wait at once, and a server that is busy half of the time looks slow."""
        return 0.0 if self.stream else PAUSED * self._call_s

    @property
    def _call_s(self) -> float:
        return self.concurrency / self.rate if self.rate else 0.0

    @property
    def pace(self) -> Pace:
        steps = REPLY_TOKENS / self.chunk_tokens
        return Pace(
            answer_s=0.0 if self.stream else self.answer_s,
            step_s=self.answer_s / steps if self.stream else 0.0,
            chunk_tokens=self.chunk_tokens,
        )

    @property
    def name(self) -> str:
        kind = "stream" if self.stream else "whole"
        kind += " with tokens" if self.tokens else ""
        pace = f" at {self.rate:g}/s" if self.rate else ""
        return f"{kind} {self.prompt_tokens} tokens x{self.concurrency}{pace}"

    def load(self) -> Load:
        # An event each for the role, the chunks and [DONE].
        events = -(-REPLY_TOKENS // self.chunk_tokens) + 2 if self.stream else 0
        return Load(
            requests(self.prompt_tokens, stream=self.stream, tokens=self.tokens),
            self.concurrency,
            issue_s=self.answer_s * 1.5 + self.issue_s,
            limit_s=self.answer_s * 3 + self.limit_s,
            ramp_s=self._call_s,
            expected_events=events,
            pause_s=self.pause_s,
        )


_rollouts = count()


def requests(prompt_tokens: int, *, stream: bool, tokens: bool = False) -> Iterator[bytes]:
    """Without end. Every so many belong to a rollout of their own."""
    prompts = [Prompt(prompt_tokens, number) for number in range(PROMPTS)]
    bodies = cycle([prompt.request(stream=stream, tokens=tokens) for prompt in prompts])
    for rollout in _rollouts:
        headers = {"x-tracegrad-rollout": f"bench-{rollout}"}
        for _ in range(_CALLS_A_ROLLOUT):
            yield request(PATH, next(bodies), headers)


def at_once() -> list[Cell]:
    """The engine answers at once: what each proxy can do at most."""
    found = []
    for stream in (False, True):
        for tokens in (200, 8192, 32768):
            for concurrency in (1, 32, 256, 1000):
                servers: tuple[str, ...] = ALL
                if stream and concurrency > 32:
                    servers = WITHOUT_LITELLM  # it would take minutes a round
                elif not stream and tokens == 8192 and 1 < concurrency < 1000:
                    servers = (*ALL, OURS_TWO, LITELLM_TWO)
                elif stream and tokens == 8192 and concurrency == 32:
                    servers = (*ALL, OURS_TWO)
                rounds = 2 if concurrency == 1000 else 3
                cell = Cell(stream, tokens, concurrency, None, servers, rounds)
                many_streams = stream and concurrency == 1000
                found.append(replace(cell, limit_s=30.0) if many_streams else cell)
    return found


def with_tokens() -> list[Cell]:
    """Every server carries what a training run needs; only one of them keeps it."""
    return [
        Cell(False, 8192, 1, tokens=True),
        Cell(False, 8192, 32, tokens=True),
        Cell(False, 8192, 256, tokens=True),
        Cell(False, 8192, 32, rate=650, tokens=True),
        Cell(True, 8192, 32, tokens=True),
        # As many callers as a small run has: held against the pass-through alone.
        Cell(False, 8192, FEW, rate=100, servers=WITHOUT_LITELLM, tokens=True),
        Cell(False, 8192, FEW, rate=650, servers=(*WITHOUT_LITELLM, OURS_TWO), tokens=True),
        Cell(True, 8192, FEW, rate=50, servers=WITHOUT_LITELLM, tokens=True),
    ]


def at_a_rate() -> list[Cell]:
    """The engine is the limit, as it is in use: does anybody notice the proxy?"""
    whole = [
        Cell(False, 8192, 32, rate=650),
        Cell(False, 8192, 256, rate=650),
        Cell(False, 8192, 32, rate=100, issue_s=2),
        Cell(False, 8192, 256, rate=100, rounds=2),
        Cell(False, 8192, 1000, rate=100, rounds=1),
    ]
    streams = [
        Cell(True, 8192, 1, rate=20, servers=WITHOUT_LITELLM, issue_s=2),
        Cell(True, 8192, 32, rate=50, servers=WITHOUT_LITELLM, issue_s=2),
        Cell(True, 8192, 256, rate=50, servers=WITHOUT_LITELLM, rounds=2),
        Cell(True, 8192, 1000, rate=50, servers=WITHOUT_LITELLM, rounds=1),
    ]
    return whole + streams


def quick() -> list[Cell]:
    """A smoke: every part once."""
    cells = [
        Cell(False, 200, 32),
        Cell(False, 8192, 1),
        Cell(False, 8192, 32, servers=(*ALL, OURS_TWO)),
        Cell(False, 32768, 32),
        Cell(True, 8192, 1),
        Cell(True, 8192, 32, servers=WITHOUT_LITELLM),
        Cell(False, 8192, 32, rate=100),
        Cell(False, 8192, 32, tokens=True),
        Cell(True, 8192, 256, rate=50, servers=WITHOUT_LITELLM),
    ]
    return [replace(cell, rounds=2, issue_s=0.5) for cell in cells]
