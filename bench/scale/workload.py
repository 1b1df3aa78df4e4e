"""What the agents do in a day: every assumption in one place, draws by seed, and what is to be
expected of them in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

DAY_S = 86_400
HOUR_S = 3_600


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of a text: log-normal, no fewer than `least` and no more than `most`. `sigma`: of the
    logarithm."""

    median: float
    sigma: float
    most: int
    least: int = 8

    def draw(self, chance: Random) -> int:
        drawn = chance.lognormvariate(math.log(self.median), self.sigma)
        return round(min(max(drawn, self.least), self.most))

    @property
    def mean(self) -> float:
        """Of min(max(X, least), most)."""
        whole = self.median * math.exp(self.sigma**2 / 2)
        low, high = (
            (math.log(bound / self.median) / self.sigma) for bound in (self.least, self.most)
        )
        within = whole * (_below(high - self.sigma) - _below(low - self.sigma))
        return self.least * _below(low) + within + self.most * (1 - _below(high))

    def times(self, factor: float) -> Length:
        """The same spread around another median."""
        return Length(self.median * factor, self.sigma, round(self.most * factor), self.least)


def _below(deviations: float) -> float:
    """The standard normal distribution function."""
    return (1 + math.erf(deviations / math.sqrt(2))) / 2


@dataclass(frozen=True, slots=True)
class EngineRates:
    """An engine (one replica of the model) as token rates, with a prefix cache that has all of a
    conversation's earlier tokens. `prefill`: prompt tokens a second; `decode`: tokens a second of
    one sequence, while `sequences` run at once.

    A call is answered after `latency_s`, and takes `busy_s` of an engine that does nothing else:
    while it decodes, others do so too.
    """

    name: str
    prefill: float
    decode: float
    sequences: int

    def latency_s(self, new: float, completion: float) -> float:
        return new / self.prefill + completion / self.decode

    def busy_s(self, new: float, completion: float) -> float:
        return new / self.prefill + completion / (self.decode * self.sequences)


# Round numbers of what such engines are said to do; none was measured here.
SMALL_MODEL = EngineRates("8B on one GPU", prefill=20_000, decode=60, sequences=64)
LARGE_MODEL = EngineRates("70B on eight GPUs", prefill=16_000, decode=40, sequences=96)


@dataclass(frozen=True, slots=True)
class Workload:
    """Rollouts begin as a Poisson process of each agent, whose rate is a cosine over the day; one
    agent may have several at once. A rollout is a conversation: instructions (those of one of
    `programs` agent programs) and a task, then a reply, a tool's output, a reply, ... Each call
    sends all of it again. `turns` is the mean of a geometric distribution that ends at
    `most_turns`; times are exponential with the means given; shares are chances.

    Unnamed rollouts are not opened, ended or rewarded by anybody: the proxy finds out which calls
    belong together.
    """

    agents: int = 10_000
    seconds: int = DAY_S
    rollouts_a_day: float = 8.0  # of each agent
    peak_hour: float = 15.0
    swing: float = 0.8  # at the peak the rate is 1 + swing times the mean
    turns: float = 12.0
    most_turns: int = 60
    programs: int = 20
    instructions: int = 1_500  # tokens
    task: Length = Length(300, 0.6, 2_000)
    observation: Length = Length(250, 1.0, 4_000)  # a tool's output
    completion: Length = Length(150, 0.7, 1_000)
    tool_s: float = 8.0
    streamed: float = 0.7
    unnamed: float = 0.2
    dialects: tuple[tuple[str, float], ...] = (
        ("chat", 0.5),
        ("anthropic", 0.25),
        ("responses", 0.15),
        ("gemini", 0.1),
    )
    rewarded: float = 0.7  # of the named
    reward_delay_s: float = 1_800.0

    # What is to be expected

    def rate(self, at: float) -> float:
        """Rollouts that an agent begins a second, at a time of the day in seconds."""
        phase = 2 * math.pi * (at / DAY_S - self.peak_hour / 24)
        return self.rollouts_a_day / DAY_S * (1 + self.swing * math.cos(phase))

    def expected_rollouts(self, begin: float, end: float) -> float:
        """That all agents begin between these times: the integral of `rate`."""
        at, until = (
            math.sin(2 * math.pi * (time / DAY_S - self.peak_hour / 24)) for time in (begin, end)
        )
        per_agent = (end - begin) / DAY_S + self.swing * (until - at) / (2 * math.pi)
        return self.agents * self.rollouts_a_day * per_agent

    @property
    def mean_turns(self) -> float:
        """The sum of P(turns > i) for i from 0: those of a geometric distribution, cut."""
        q = self._goes_on
        return (1 - q**self.most_turns) / (1 - q)

    @property
    def expected_calls(self) -> float:
        """Of a whole day, those that the end of it cuts off included."""
        return self.expected_rollouts(0, self.seconds) * self.mean_turns

    @property
    def peak_calls_s(self) -> float:
        """Calls a second in the hour around the peak, if each came as its rollout begins."""
        peak, half = self.peak_hour * HOUR_S, HOUR_S / 2
        return self.expected_rollouts(peak - half, peak + half) * self.mean_turns / HOUR_S

    @property
    def mean_new_tokens(self) -> float:
        """Of a call's prompt: those that no earlier prompt or reply of its rollout has."""
        first = self.instructions + self.task.mean
        return (first + (self.mean_turns - 1) * self.observation.mean) / self.mean_turns

    @property
    def mean_prompt(self) -> float:
        """Tokens of a call's prompt. Of a rollout's calls the i-th has i observations and replies
        more than the first; the sum over them of i is that of i·P(turns > i)."""
        q = self._goes_on
        grown = sum(i * q**i for i in range(1, self.most_turns))
        growth = self.observation.mean + self.completion.mean
        return self.instructions + self.task.mean + grown / self.mean_turns * growth

    @property
    def _goes_on(self) -> float:
        return 1 - 1 / self.turns


@dataclass(frozen=True, slots=True)
class Turn:
    """`said`: tokens that are said before the reply, a task's or a tool's. `tool_s`: what the
    agent does after it."""

    said: int
    completion: int
    tool_s: float
    streamed: bool


@dataclass(frozen=True, slots=True)
class Rollout:
    """`begins`: seconds of the day. `reward_after_s`: from its end; None: it gets no reward."""

    agent: int
    number: int
    begins: float
    dialect: str
    named: bool
    program: int
    turns: tuple[Turn, ...]
    reward_after_s: float | None


def rollouts_of(workload: Workload, agent: int, seed: int) -> Iterator[Rollout]:
    """In the order of their begins; the same whatever other agents do."""
    chance = Random(f"{seed} {agent}")
    for number, begins in enumerate(_begins(workload, chance)):
        yield _rollout(workload, chance, agent, number, begins)


def _begins(workload: Workload, chance: Random) -> list[float]:
    """A Poisson process of the highest rate, thinned to that of each time."""
    highest = workload.rollouts_a_day / DAY_S * (1 + abs(workload.swing))
    at, found = 0.0, list[float]()
    while (at := at + chance.expovariate(highest)) < workload.seconds:
        if chance.random() * highest < workload.rate(at):
            found.append(at)
    return found


def _rollout(workload: Workload, chance: Random, agent: int, number: int, begins: float) -> Rollout:
    turns = 1
    while turns < workload.most_turns and chance.random() < 1 - 1 / workload.turns:
        turns += 1
    names, shares = zip(*workload.dialects, strict=True)
    named = chance.random() >= workload.unnamed
    rewarded = named and chance.random() < workload.rewarded
    return Rollout(
        agent,
        number,
        begins,
        dialect=chance.choices(names, shares)[0],
        named=named,
        program=chance.randrange(workload.programs),
        turns=tuple(
            Turn(
                said=(workload.observation if turn else workload.task).draw(chance),
                completion=workload.completion.draw(chance),
                tool_s=chance.expovariate(1 / workload.tool_s),
                streamed=chance.random() < workload.streamed,
            )
            for turn in range(turns)
        ),
        reward_after_s=chance.expovariate(1 / workload.reward_delay_s) if rewarded else None,
    )
