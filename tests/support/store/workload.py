"""What the victims of the fault tests write: made again from a seed, so that a test knows every
event of every submission, acknowledged or not, and can compare it with what a store has kept.

An agent writes rollouts one after the other. A rollout comes in waves; a wave is several
*parcels* (the events of one submission) that wait for each other's ends before the next begins.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tracegrad.events import (
    Event,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Span,
    Turn,
    logprob_array,
)
from tracegrad.store import GroupCommitWriter, StoreUnavailable

_MOST_OF_WAVE = 3


@dataclass(frozen=True)
class Submission:
    """Facts that stand or fall together. `place` is (rollout's number, wave, index)."""

    agent: str
    place: tuple[int, int, int]
    events: tuple[Event, ...]

    def __str__(self) -> str:
        return f"{self.agent}/{'/'.join(map(str, self.place))}"


@dataclass
class Acknowledged:
    """What was acknowledged to one agent."""

    places: set[tuple[int, int, int]] = field(default_factory=set)
    begun: int = 0  # rollouts up to this number may have been begun
    next: tuple[int, int] = (0, 0)  # rollout and wave that the next process starts with

    def add(self, place: tuple[int, int, int]) -> None:
        self.places.add(place)
        # The next wave begins when all parcels of this one are acknowledged.
        self.next = max(self.next, place[:2])
        self.begun = max(self.begun, place[0] + 1)  # the next may have been begun too

    def give_up(self) -> None:
        """Go on with another rollout, as after a client that did not ask again."""
        self.next = (self.begun + 1, 0)
        self.begun += 1


def rollout_id(agent: str, number: int) -> str:
    return f"{agent}-{number}"


def waves(seed: str, agent: str, number: int) -> list[list[Submission]]:
    """A rollout of 3 to 14 turns in a tree, with rewards, spans, and mostly an end."""
    draw = random.Random(f"{seed}/{agent}/{number}")
    name = rollout_id(agent, number)
    at = 1000.0 + number
    opened = RolloutStarted(
        rollout_id=name,
        task_id=f"task {number % 7}",
        agent=agent,
        tags={"split": "train", "agent": agent},
        opened_at=at,
    )
    root = _turn(draw, name, "0", None, at)
    found: list[list[Sequence[Event]]] = [[[opened, root]]]
    leaves = [root]
    for depth in range(1, draw.randint(2, 5)):
        wave: list[Sequence[Event]] = []
        grown: list[Turn] = []
        for index in range(draw.randint(1, _MOST_OF_WAVE)):
            turn = _turn(draw, name, f"{depth}.{index}", draw.choice(leaves), at + depth)
            grown.append(turn)
            wave.append([turn, *_about(draw, turn)])
        leaves = grown
        found.append(wave)
    if draw.random() < 0.9:
        found.append([_end(draw, name, at + 10)])
    return [
        [
            Submission(agent, (number, step, index), tuple(events))
            for index, events in enumerate(wave)
        ]
        for step, wave in enumerate(found)
    ]


def _turn(draw: random.Random, rollout: str, name: str, parent: Turn | None, at: float) -> Turn:
    known = parent.prompt_token_ids + parent.completion_token_ids if parent else array("i")
    new, sampled = _tokens(draw, draw.randint(1, 400)), _tokens(draw, draw.randint(0, 150))
    count = len(sampled)
    first = draw.randint(0, count)
    reply = {"role": "assistant", "content": f"answer {name} {draw.random()}"}
    asked = list(parent.request["messages"]) if parent and parent.request else []
    if parent is not None and parent.response is not None:
        asked.append(parent.response["choices"][0]["message"])
    asked.append({"role": "user", "content": f"question {name} " + "why? " * draw.randint(0, 60)})
    return Turn(
        turn_id=f"{rollout}.{name}",
        rollout_id=rollout,
        parent_id=parent.turn_id if parent else None,
        dialect="chat",
        model="m",
        prompt_token_ids=known + new,
        completion_token_ids=sampled,
        completion_logprobs=logprob_array([-0.5 - draw.random() for _ in range(count)]),
        policy_versions=tuple((v, n) for v, n in ((3, first), (4, count - first)) if n),
        finish_reason="stop",
        request={"model": "m", "messages": asked},
        response={"id": f"chatcmpl-{rollout}.{name}", "choices": [{"index": 0, "message": reply}]},
        created_at=at,
    )


def _tokens(draw: random.Random, count: int) -> array[int]:
    return array("i", array("H", draw.randbytes(2 * count)))


def _about(draw: random.Random, turn: Turn) -> Iterator[Event]:
    if draw.random() < 0.3:
        yield Reward(
            reward_id=f"{turn.turn_id}.reward",
            rollout_id=turn.rollout_id,
            value=draw.random(),
            turn=draw.randint(0, 3),
            created_at=turn.created_at,
        )
    if draw.random() < 0.3:
        yield Span(
            trace_id=draw.randbytes(16).hex(),
            span_id=draw.randbytes(8).hex(),
            rollout_id=turn.rollout_id,
            name=f"look_up of {turn.turn_id}",
            start_ns=1000,
            end_ns=2000,
            attributes={"turn": turn.turn_id},
        )


def _end(draw: random.Random, rollout: str, at: float) -> list[Event]:
    reward = Reward(
        reward_id=f"{rollout}.reward", rollout_id=rollout, value=draw.random(), created_at=at
    )
    outcome = draw.choice([Outcome.COMPLETED, Outcome.AGENT_ERROR, Outcome.INFRA_ERROR])
    return [reward, RolloutFinished(rollout_id=rollout, outcome=outcome, finished_at=at)]


@dataclass
class WriterAgents:
    """Threads that write for ever, each as one agent; `refused` hears of every refusal.

    A refused wave is written again, as clients do that may come back.
    """

    writer: GroupCommitWriter
    seed: str
    acknowledge: Callable[[Submission], None]
    refused: Callable[[StoreUnavailable], None]
    over: threading.Event = field(default_factory=threading.Event)
    # What ended an agent; a refusal does not.
    failures: list[BaseException] = field(default_factory=list)

    def start(self, agents: Mapping[str, tuple[int, int]]) -> list[threading.Thread]:
        """`agents`: where each of them goes on, a rollout and a wave of it."""
        threads = [
            threading.Thread(target=self._live, args=(name, *place), name=name, daemon=True)
            for name, place in agents.items()
        ]
        for thread in threads:
            thread.start()
        return threads

    def _live(self, agent: str, number: int, wave: int) -> None:
        try:
            self._work(agent, number, wave)
        except BaseException as error:
            self.failures.append(error)
            raise

    def _work(self, agent: str, number: int, wave: int) -> None:
        while True:
            for parcels in waves(self.seed, agent, number)[wave:]:
                while not self._written(parcels):
                    if self.over.wait(0.05):
                        return
                if self.over.is_set():
                    return
            number, wave = number + 1, 0

    def _written(self, parcels: Sequence[Submission]) -> bool:
        """Each is acknowledged as soon as it is known to be stored."""
        under_way: list[tuple[Submission, Future[None]]] = [
            (parcel, self.writer.submit(parcel.events)) for parcel in parcels
        ]
        all_are = True
        for parcel, future in under_way:
            try:
                future.result(timeout=120)
            except StoreUnavailable as error:
                self.refused(error)
                all_are = False
            else:
                self.acknowledge(parcel)
        return all_are


def resume_points(acknowledged: Mapping[str, Acknowledged]) -> dict[str, Any]:
    """Where each agent goes on, as JSON can say it."""
    return {agent: list(each.next) for agent, each in acknowledged.items()}
