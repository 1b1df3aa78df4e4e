"""Why nothing is trained right now, in a line: what the next batch needs, and what there is.

`24 tasks have 1 of 4 attempts; 0 of 2 groups ready; newest 3 min ago`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tracegrad.events import Json
from tracegrad.store import Ledger, Store
from tracegrad.store.ledger.idle import MOST_LOOKED_AT
from tracegrad.store.ledger.leases import NO_OVER_SAMPLE, OverSample
from tracegrad.store.ledger.readiness import BatchReadiness
from tracegrad.store.read.scorings import ScoringFailure
from tracegrad.store.types import InferredOpen
from tracegrad.text_format import format_age, format_count, format_elapsed
from tracegrad_trainer.rewards.config import COMPOSING

# What a run without `data.idle_s` is told to set.
IDLE_FIX = "data.idle_s=60"
# What differs by less is of no use to anybody.
_CLOCKS_AGREE_S = 10.0
# What is said of so many reasons; those that concern the most rollouts come first.
_MOST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNeeds:
    """What settings say of the next batch; of a run's resolved settings, as JSON."""

    groups: int
    group_size: int
    tags: Mapping[str, str]
    incomplete_after_s: float
    refills: bool
    url: str | None  # the proxy's
    idle_s: float | None = None
    over_sample: OverSample = NO_OVER_SAMPLE
    composed: bool = False  # the reward is a sum of parts that scorers give
    held_out: Mapping[str, str] | None = None
    judges_similar: bool = False  # rollouts without a task are grouped (rewards.judge.groups)

    @classmethod
    def of(cls, resolved: Json, url: str | None) -> BatchNeeds:
        """Raises KeyError: these are no settings of a trainer."""
        batches, data = resolved["batches"], resolved["data"]
        refill, promotion = data.get("refill"), resolved.get("promotion", {})
        return cls(
            groups=batches["groups"],
            group_size=batches["group_size"],
            tags=data["tags"],
            incomplete_after_s=data["incomplete_after_s"],
            refills=resolved["objective"].get("preset") == "dapo" if refill is None else refill,
            url=url,
            idle_s=data.get("idle_s"),
            over_sample=OverSample(
                data.get("over_sample", 0), data.get("over_sample_keep", "first")
            ),
            composed=any(resolved.get("rewards", {}).get(name) for name in COMPOSING),
            held_out=promotion["tags"] if promotion.get("gate") == "held_out" else None,
            judges_similar=(resolved.get("rewards", {}).get("judge") or {}).get("groups")
            == "similar",
        )


@dataclass(frozen=True, slots=True)
class WaitReason:
    """`kind` is the first reason's name: it changes with the reason, not with its counts."""

    kind: str
    text: str


def wait_reason(
    store: Store,
    needs: BatchNeeds,
    run_id: str | None = None,
    *,
    running: bool = True,
    given_back: str | None = None,
) -> WaitReason:
    """`run_id`: whose leases are the batch under way, and nobody else's. `running`: whether it
    runs; if not, they are what a killed one has left. `given_back`: as the ranks explain it, where
    they have given batches back. Raises StoreError."""
    if given_back is not None:
        return WaitReason("given_back", given_back)
    found = Ledger(store).readiness(
        group_size=needs.group_size,
        tags=needs.tags,
        incomplete_after_s=needs.incomplete_after_s,
        over_sample=needs.over_sample,
        composed=needs.composed,
        held_out=needs.held_out,
    )
    if found.is_empty:
        where = f" at {needs.url}/v1" if needs.url else ""
        return WaitReason("no_rollouts", f"no rollout yet: point agents at the proxy{where}")
    parts = sorted(_parts(found, needs, run_id), key=lambda part: -part[1])
    ready = f"{found.groups} of {format_count(needs.groups, 'group')} ready"
    age = "" if found.newest is None else f"newest {format_age(found.newest)} ago"
    ours = sum(count for owner, count in found.leased.items() if _is_ours(owner, run_id))
    if ours and not needs.refills:  # held for a moment: a step of it is about to be made
        batch = f"a batch of {format_count(ours, 'rollout')}"
        if running:
            return WaitReason("ready", f"{batch} is under way")
        return WaitReason("left", f"{batch} was under way: the next run takes it again")
    if found.groups >= needs.groups:
        if found.groups > needs.groups:
            ready = f"{found.groups} groups ready, of which a batch takes {needs.groups}"
        return WaitReason("ready", "; ".join(filter(None, [ready, age])))
    if not parts and not found.groups:
        return WaitReason("idle", "; ".join(filter(None, ["no new rollouts", ready, age])))
    said = [text for _, _, text in parts[:_MOST]]
    said.insert(1 if said else 0, ready)
    kind = parts[0][0] if parts else "few_groups"
    return WaitReason(kind, "; ".join(filter(None, [*said, age])))


def _parts(
    found: BatchReadiness, needs: BatchNeeds, run_id: str | None
) -> list[tuple[str, int, str]]:
    """Each reason: its name, how many rollouts (or turns) it holds back, and its words."""
    states = found.states
    parts = [
        (
            "few_attempts",
            sum(have * tasks for have, tasks in found.attempts.items()),
            _attempts(found.attempts, needs.group_size) + _smaller(found.smaller_in_s),
        ),
        *_leases(found.leased, run_id),
        *_open(found, needs.idle_s),
    ]
    parts += [
        (name, count, words(format_count(count, "rollout")))
        for name, count, words in (
            ("no_task", states.get("no_task", 0), _no_task),
            ("not_selected", states.get("not_selected", 0), lambda n: _not_selected(n, needs.tags)),
            *((name, states.get(name, 0), words) for name, words in _STATES.items()),
        )
        if not (needs.composed and name in _UNREWARDED)
    ]
    unsummed = sum(states.get(name, 0) for name in _UNREWARDED) if needs.composed else 0
    alike = _judged_alike(needs.incomplete_after_s) if needs.judges_similar else ""
    parts.append(("unscored", unsummed, _unscored(unsummed) + alike))
    failed = states.get("scoring_failed", 0)
    parts.append(("scoring_failed", failed, _scoring_failed(failed, found.scoring_failures)))
    for outcome, count in found.unscored.items():
        text = f"{format_count(count, 'rollout')} ended with {outcome}, which is not scored"
        parts.append((outcome, count, text))
    skipped = sum(found.passed.values())
    parts.append(("filtered", skipped, _filtered(skipped, found.passed)))
    return [part for part in parts if part[1]]


_STATES: Mapping[str, Callable[[str], str]] = {
    "no_reward": lambda n: f"{n} ended without a reward",
    "named_reward": lambda n: f'{n} with other rewards than the main one, named "reward"',
    "no_turns": lambda n: f"{n} ended without a recorded call",
    "held_out": lambda n: f"{n} held out, which are never trained",
}


_UNREWARDED = ("no_reward", "named_reward")


def _unscored(rollouts: int) -> str:
    return (
        f"{format_count(rollouts, 'rollout')} ended, and lack"
        f"{'s' if rollouts == 1 else ''} a part of the reward (scorers that are not done, or a part"
        " that somebody is to give)"
    )


def _judged_alike(incomplete_after_s: float) -> str:
    return (
        "; those without a task are judged with similar ones when their group is whole, or after"
        f" {incomplete_after_s:g} s (`trainer step --dry-run` shows the groups)"
    )


def _scoring_failed(rollouts: int, failures: Sequence[ScoringFailure]) -> str:
    """`3 rollouts could not be scored: resolved timed out after 30 s`"""
    said = f"{format_count(rollouts, 'rollout')} could not be scored"
    if not failures:
        return said
    first, *others = failures
    more = f" (and {format_count(len(others), 'other error')})" if others else ""
    return f"{said}: {first.error}{more}"


def _open(found: BatchReadiness, idle_s: float | None) -> list[tuple[str, int, str]]:
    """Those that somebody is to end, and those that nobody will."""
    inferred = found.inferred_open
    is_cut = inferred.rollouts == MOST_LOOKED_AT
    nobodys = found.unopened if is_cut else inferred.rollouts
    others = found.states.get("open", 0) - nobodys
    return [
        ("open", others, f"{format_count(others, 'rollout')} not finished"),
        ("idle_open", nobodys, describe_inferred_open(inferred, idle_s)),
    ]


def describe_inferred_open(found: InferredOpen, idle_s: float | None) -> str:
    """`3 rollouts that nobody opened are open: idle for 12 s of 60 (data.idle_s)`; "" where there
    are none."""
    if found.idle_for_s is None:
        return ""
    count = format_count(found.rollouts, "rollout")
    if found.rollouts == MOST_LOOKED_AT:
        count = f"{count} or more"
    who = f"{count} that nobody opened {'is' if found.rollouts == 1 else 'are'} open"
    if idle_s is None:
        return f"{who}, and nobody ends them: --set {IDLE_FIX} closes those without a call for 60 s"
    if found.idle_for_s < -_CLOCKS_AGREE_S:
        ahead = format_elapsed(-found.idle_for_s)
        return f"{who}: their calls are dated {ahead} ahead of the store's clock (data.idle_s)"
    longest = "" if found.rollouts == 1 else "the first "
    idle_for_s = max(0.0, found.idle_for_s)
    return f"{who}: {longest}idle for {idle_for_s:.0f} s of {idle_s:g} (data.idle_s)"


def _attempts(attempts: Mapping[int, int], wanted: int) -> str:
    """`24 tasks have 1 of 4 attempts, 3 have 2 of 4`"""
    ordered = sorted(attempts.items(), key=lambda item: (-item[1], item[0]))
    texts = []
    for i, (have, tasks) in enumerate(ordered):
        who = str(tasks) if i else format_count(tasks, "task")
        texts.append(f"{who} {'has' if tasks == 1 else 'have'} {have} of {wanted}")
        texts[-1] += "" if i else " attempts"
    return ", ".join(texts)


def _smaller(seconds: float | None) -> str:
    return "" if seconds is None else f" (a smaller group is taken in {format_elapsed(seconds)})"


def _is_ours(owner: str, run_id: str | None) -> bool:
    return run_id is not None and owner.endswith(f":{run_id}")


def _leases(leased: Mapping[str, int], run_id: str | None) -> list[tuple[str, int, str]]:
    parts = []
    for owner, count in leased.items():
        rollouts = format_count(count, "rollout")
        if _is_ours(owner, run_id):
            held = f"{rollouts} held for a batch that waits for groups of different rewards"
            parts.append(("held", count, held))
        else:
            parts.append(("leased", count, f"{rollouts} leased to another trainer ({owner})"))
    return parts


def _no_task(rollouts: str) -> str:
    return f"{rollouts} without a task, which no group has: name it where a rollout is opened"


def _not_selected(rollouts: str, tags: Mapping[str, str]) -> str:
    wanted = " ".join(f"{key}={value}" for key, value in tags.items())
    return f"{rollouts} without the tags that data.tags asks for ({wanted})"


def _filtered(turns: int, passed: Mapping[str, int]) -> str:
    ordered = sorted(passed.items(), key=lambda item: (-item[1], item[0]))
    reasons = ", ".join(f"{count} {reason}" for reason, count in ordered)
    return f"{format_count(turns, 'turn')} since the last step could not be trained ({reasons})"
