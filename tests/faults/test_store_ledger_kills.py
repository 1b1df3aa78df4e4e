"""Trainers killed with SIGKILL at random moments: every turn is trained, or skipped, once."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import select

from support.store.durability_check import integrity
from support.store.kill_runs import KillCounts, RandomKiller, all_at_once, drawn_seed, fork_servers
from support.store.killed_process import GROUP_SIZE
from tracegrad.events import (
    Event,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Turn,
    logprob_array,
    token_id_array,
)
from tracegrad.store import Ledger, Store
from tracegrad.store.models import Leases, Rollouts, TurnLedger, Turns

_WORKERS = 3
_KILLS = 36
_TRANSACTIONS = 30  # that a worker begins at most before it is killed
_GROUPS_A_WORKER = 6  # come in before each worker starts


@dataclass
class Tasks:
    """Finished rollouts, made as workers need them."""

    store: Store
    draw: random.Random
    turns: set[str] = field(default_factory=set)
    _made: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, groups: int) -> None:
        with self._lock:
            for _ in range(groups):
                self._made += 1
                self.store.append(self._group(f"t{self._made}"))

    def _group(self, task: str) -> list[Event]:
        outcomes = [*[Outcome.COMPLETED] * GROUP_SIZE, Outcome.INFRA_ERROR]
        facts: list[Event] = []
        for number, outcome in enumerate(outcomes):
            rollout = f"{task}-{number}"
            facts.append(RolloutStarted(rollout_id=rollout, task_id=task))
            facts += [_turn(f"{rollout}.{n}", rollout) for n in range(self.draw.randint(1, 4))]
            facts.append(Reward(rollout_id=rollout, value=1.0))
            facts.append(RolloutFinished(rollout_id=rollout, outcome=outcome))
        self.turns |= {fact.turn_id for fact in facts if isinstance(fact, Turn)}
        return facts


def _turn(name: str, rollout: str) -> Turn:
    return Turn(
        turn_id=name,
        rollout_id=rollout,
        dialect="chat",
        model="m",
        prompt_token_ids=token_id_array([1, 2, 3]),
        completion_token_ids=token_id_array([4, 5]),
        completion_logprobs=logprob_array([-0.5, -0.5]),
        policy_versions=((0, 2),),
    )


@dataclass
class Heard:
    """What workers said of the steps that were acknowledged to them."""

    steps: dict[int, tuple[list[str], list[str]]] = field(default_factory=dict)
    twice: list[str] = field(default_factory=list)
    refused: int = 0  # commits of turns that another worker had trained meanwhile
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hear(self, said: list[Any]) -> None:
        with self._lock:
            match said:
                case ["step", number, trained, skipped]:
                    if number in self.steps:
                        self.twice.append(f"step {number} was acknowledged to two workers")
                    self.steps[number] = trained, skipped
                case ["refused", _]:
                    self.refused += 1
                case ["open"]:
                    pass
                case _:
                    raise AssertionError(f"a worker says {said}")


def test_killed_trainers_train_every_turn_once(url: str, tmp_path: Path) -> None:
    seed = drawn_seed()
    draw, heard = random.Random(seed), Heard()
    with Store.open(url) as store, fork_servers("train", url, tmp_path, _WORKERS) as found:
        tasks = Tasks(store, random.Random(draw.random()))

        def order() -> dict[str, Any]:
            tasks.add(_GROUPS_A_WORKER)
            return {"seed": draw.random(), "owner": f"worker {draw.random()}"}

        killers = [
            RandomKiller(each, random.Random(draw.random()), order, heard.hear, _TRANSACTIONS)
            for each in found
        ]
        all_at_once([partial(killer.kill, _KILLS // _WORKERS) for killer in killers])
        of_the_killed = len(Ledger(store).steps())
        rest = {**order(), "kill": None, "until_all": True}
        status, _ = found[0].one(rest, heard.hear)
        assert status == 0, "the last worker, whom nobody kills, does not get to the end"
        faults = [*heard.twice, *_once(store, tasks.turns), *_steps(store, heard)]
        faults += [*_leases(store), *integrity(store)]
        steps, counts, again = Ledger(store).steps(), store.turn_counts(), _leased_again(store)
    toll = KillCounts.of(killers)
    print(f"{toll}; {of_the_killed} of {len(steps)} steps by the killed,")
    print(f"{len(heard.steps)} acknowledged, {heard.refused} refused; {counts}")
    print(f"{again} rollouts leased again after their worker's end")
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:20])
    toll.check(_KILLS)
    assert of_the_killed >= _KILLS // 10, "the killed trained next to nothing"
    assert again >= _KILLS // 10, "next to no lease outlived its owner"


def _once(store: Store, made: set[str]) -> list[str]:
    """Each turn has one row in the ledger, which its rollout agrees with."""
    query = (
        select(Turns.turn_id, TurnLedger.step, TurnLedger.skip_reason, Rollouts.consumed_step)
        .join(Rollouts, Rollouts.rollout_id == Turns.rollout_id)
        .outerjoin(TurnLedger, TurnLedger.turn_id == Turns.turn_id)
    )
    with store.reading() as connection:
        rows = connection.execute(query).all()
    faults = [f"turn {turn} is not in the store" for turn in made - {row[0] for row in rows}]
    for turn, step, reason, consumed in rows:
        if step is None and reason is None:
            faults.append(f"turn {turn} was neither trained nor skipped")
        elif step is not None and step != consumed:
            faults.append(f"turn {turn} was trained by {step}, its rollout by {consumed}")
    counts = store.turn_counts()
    if counts.pending or counts.captured != len(made):
        faults.append(f"{len(made)} turns were made; {counts}")
    return faults


def _steps(store: Store, heard: Heard) -> list[str]:
    """Those that were acknowledged are whole, and so are those that were not."""
    trained: defaultdict[int, set[str]] = defaultdict(set)
    filtered: set[str] = set()
    with store.reading() as connection:
        query = select(TurnLedger.turn_id, TurnLedger.step, TurnLedger.skip_reason)
        for turn, step, reason in connection.execute(query):
            if step is not None:
                trained[step].add(turn)
            elif reason == "filtered":
                filtered.add(turn)
    stored = {step.step: step.metrics for step in Ledger(store).steps()}
    faults = [f"step {n} was acknowledged, and is gone" for n in heard.steps.keys() - stored.keys()]
    for number, (mine, skipped) in heard.steps.items():
        if set(mine) != set(stored.get(number, {}).get("trained", ())):
            faults.append(f"step {number} was acknowledged to one worker, and is another's")
        faults += [f"turn {turn} was skipped by step {number}" for turn in set(skipped) - filtered]
    for number, metrics in stored.items():
        if trained[number] != set(metrics["trained"]):
            differ = sorted(trained[number] ^ set(metrics["trained"]))
            faults.append(f"step {number} is half there: {', '.join(differ)}")
        lacking = set(metrics["skipped"]) - filtered
        faults += [f"turn {turn}: its skip by step {number} is lost" for turn in lacking]
    return faults


def _leases(store: Store) -> list[str]:
    """A lease is of whole groups."""
    with store.reading() as connection:
        rows = connection.execute(
            select(Leases.lease_id, Rollouts.task_id).join(
                Rollouts, Rollouts.rollout_id == Leases.rollout_id
            )
        )
        sizes = Counter((lease, task) for lease, task in rows)
    return [
        f"lease {lease} has {size} rollouts of task {task}"
        for (lease, task), size in sizes.items()
        if size != GROUP_SIZE
    ]


def _leased_again(store: Store) -> int:
    with store.reading() as connection:
        times = Counter(
            connection.scalars(select(Leases.rollout_id).where(Leases.released_at.is_(None)))
        )
    return sum(count > 1 for count in times.values())
