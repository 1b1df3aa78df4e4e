"""Stores with a bit of everything, made from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from support.trainer.routing_files import experts_of
from tracegrad.events import (
    OVER_LENGTH,
    Event,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutInferred,
    RolloutStarted,
    Span,
    Turn,
    logprob_array,
    token_id_array,
)
from tracegrad.store import Ledger, PolicyVersion, StepRecord, Store
from tracegrad.store.copy.export_records import (
    RolloutRecord,
    VersionRecord,
    iter_rollouts,
    iter_spans_without_rollout,
    load_steps,
    load_versions,
)

# An empty store in "sqlite" or "postgres".
NewStore = Callable[[str], Store]
WORDS = ("mug", "größe", "日本", "a\nb", "", "\ud83d\ude00", '"quoted"', "x" * 300)


@dataclass(frozen=True)
class Everything:
    """All that a copy of a store must have."""

    rollouts: list[RolloutRecord]
    steps: list[StepRecord]
    versions: list[VersionRecord]
    spans: list[Span]


def everything(store: Store) -> Everything:
    return Everything(
        rollouts=list(iter_rollouts(store)),
        steps=load_steps(store),
        versions=load_versions(store),
        spans=[span for spans in iter_spans_without_rollout(store) for span in spans],
    )


def fill(store: Store, seed: int, rollouts: int = 8) -> None:
    make = _Maker(random.Random(seed))
    copies = [make.rollout(f"{seed:04x}-{number:04x}") for number in range(rollouts)]
    for facts in copies:
        store.append(facts)
    Ledger(store).close_idle(1.0)  # of those that nobody opened or ended, some
    make.history(store, copies)
    store.append([make.span(None) for _ in range(3)])


class _Maker:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def _maybe(self, value: Any) -> Any:
        return value if self._chance.random() < 0.6 else None

    def _word(self) -> str:
        return self._chance.choice(WORDS)

    def _time(self) -> float:
        return self._chance.uniform(1e9, 2e9)

    def json(self, depth: int = 2) -> dict[str, Any]:
        values: list[Any] = [1, 2**70, -0.5, 1e-9, True, None, self._word(), [1, "two", None]]
        if depth:
            values.append(self.json(depth - 1))
        return {f"k{i}": self._chance.choice(values) for i in range(self._chance.randrange(4))}

    def rollout(self, rollout_id: str) -> list[Event]:
        facts: list[Event] = []
        if self._chance.random() < 0.85:
            facts.append(
                RolloutStarted(
                    rollout_id=rollout_id,
                    task_id=self._maybe(self._chance.choice(["t1", "t2", "größe"])),
                    agent=self._maybe("shop"),
                    tags={f"t{i}": self._word() for i in range(self._chance.randrange(3))},
                    task=self._maybe(self.json()),
                    held_out=self._chance.random() < 0.3,
                    opened_at=self._time(),
                )
            )
        else:
            before = self._maybe(f"{rollout_id}-before")
            facts.append(RolloutInferred(rollout_id=rollout_id, continues=before))
        turns = self._turns(rollout_id, self._chance.randrange(5))
        facts += turns
        facts += [self._reward(rollout_id) for _ in range(self._chance.randrange(4))]
        facts += [self.span(rollout_id) for _ in range(self._chance.randrange(3))]
        facts += [self._end(rollout_id) for _ in range(self._chance.randrange(3))]
        if len(facts) > len(turns) and self._chance.random() < 0.3:
            # A turn that came in after its rollout had ended.
            facts += self._turns(rollout_id, 1, "late")
        return facts or [self._reward(rollout_id)]

    def _turns(self, rollout_id: str, number: int, name: str = "turn") -> list[Turn]:
        turns: list[Turn] = []
        messages: list[dict[str, Any]] = [{"role": "system", "content": self._word()}]
        for index in range(number):
            parent = self._chance.choice([None, *turns])
            messages = [*messages, {"role": "user", "content": self._word() + str(index)}]
            turns.append(self._turn(rollout_id, f"{rollout_id}.{name}{index}", parent, messages))
        return turns

    def _turn(
        self, rollout_id: str, turn_id: str, parent: Turn | None, messages: list[dict[str, Any]]
    ) -> Turn:
        known = (
            parent.prompt_token_ids + parent.completion_token_ids if parent else token_id_array()
        )
        new, sampled = token_id_array(self._ids(20)), self._ids(6)
        first = self._chance.randrange(len(sampled) + 1)
        versions = [(self._chance.randrange(3), first), (3, len(sampled) - first)]
        return Turn(
            turn_id=turn_id,
            rollout_id=rollout_id,
            parent_id=parent.turn_id if parent else None,
            fork_reason=self._maybe("edited_history"),
            dialect=self._chance.choice(["chat", "messages", "responses"]),
            model=self._word(),
            prompt_token_ids=known + new,
            completion_token_ids=token_id_array(sampled),
            completion_logprobs=logprob_array(self._logprob() for _ in sampled),
            policy_versions=tuple((v, n) for v, n in versions if n),
            sampling=self.json(),
            finish_reason=self._maybe("stop"),
            untrainable=self._maybe(OVER_LENGTH),
            parent_span_id=self._maybe("a" * 16),
            request=self._maybe({"messages": messages, **self.json()}),
            response=self._maybe(self.json()),
            state_key=self._maybe(self._word()),
            agent_name=self._maybe(self._word()),
            asked_model=self._maybe(self._word()),
            observation=self._maybe("0f" * 16),
            timing=self._maybe({"prefill": 0.25, "decode": self._chance.random()}),
            routed_experts=self._experts(len(known) + len(new) + len(sampled)),
            created_at=self._time(),
        )

    def _experts(self, tokens: int) -> bytes | None:
        of = self._chance.randrange(1, tokens) if tokens > 1 else 0
        kind = self._chance.choice(["|u1", "<u2", "<i4"])
        return self._maybe(experts_of(of, kind=kind, seed=of)) if of else None

    def _ids(self, most: int) -> list[int]:
        number = self._chance.randrange(most)
        return [self._chance.choice([0, 7, 2**31 - 1, 151_643]) for _ in range(number)]

    def _logprob(self) -> float:
        odd = [math.nan, math.inf, -math.inf, -3.4e38, 1e-45, 0.0]
        return self._chance.choice(odd) if self._chance.random() < 0.1 else -self._chance.random()

    def _reward(self, rollout_id: str) -> Reward:
        return Reward(
            rollout_id=rollout_id,
            reward_id=f"{self._chance.getrandbits(128):032x}",
            value=self._chance.choice([0.0, 1.0, -1e6, 0.1]),
            name=self._chance.choice(["reward", "format"]),
            turn=self._maybe(self._chance.choice([0, -1])),
            source=self._chance.choice(["admin_key", "claimed"]),
            label=self._maybe(self._word()),
            given_at=self._maybe(self._time()),
            created_at=self._chance.choice([1e9, self._time()]),
        )

    def span(self, rollout_id: str | None) -> Span:
        # A trace belongs to one rollout, or to none.
        return Span(
            trace_id=f"{hash_of(rollout_id)}{'0' * 16}"[:32],
            span_id=f"{self._chance.getrandbits(64):016x}",
            parent_span_id=self._maybe("b" * 16),
            rollout_id=rollout_id,
            name=self._word(),
            kind="internal",
            start_ns=self._chance.getrandbits(60),
            end_ns=self._chance.getrandbits(60),
            status=self._chance.choice(["unset", "ok", "error"]),
            attributes=self.json(),
        )

    def _end(self, rollout_id: str) -> RolloutFinished:
        return RolloutFinished(
            rollout_id=rollout_id,
            outcome=self._chance.choice(list(Outcome)),
            error=self._maybe(self._word()),
            finished_at=self._time(),
        )

    def history(self, store: Store, rollouts: Sequence[Sequence[Event]]) -> None:
        """Versions, and two steps that some of the rollouts were trained by."""
        for version, state in [(0, "serving"), (1, "pushing"), (1, "serving"), (2, "failed")]:
            # What served before the first step is of none.
            record = PolicyVersion(version, version or None, state, self._time(), self.json())  # type: ignore[arg-type]
            store.record_version(record)
        ledger = Ledger(store)
        for step in (1, 2):
            chosen = [f for n, f in enumerate(rollouts) if n % 4 == step]
            turns = [fact.turn_id for facts in chosen for fact in facts if isinstance(fact, Turn)]
            ledger.commit_step(
                StepRecord(step=step, version=step, settings=self.json(), metrics={"loss": 0.1}),
                trained=turns[::2],
                skipped=dict.fromkeys(turns[1::2], "stale"),
                rollouts=[facts[0].rollout_id for facts in chosen if facts[0].rollout_id],
                advantages={turn: self._chance.uniform(-2, 2) for turn in turns[::4]},
            )


def hash_of(rollout_id: str | None) -> str:
    return (rollout_id or "nobody").encode().hex()[:16].ljust(16, "0")
