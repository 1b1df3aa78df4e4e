"""Whether each step trained what was its own, once, and began with weights that were committed.

The ledger refuses what is not so; this finds what got in before it did, and checkpoints that were
changed or replaced since.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, select

from tracegrad.events import Json
from tracegrad.store.checkpoint_manifest import MANIFEST_NAME, manifest_digest
from tracegrad.store.maintenance.findings import Finding
from tracegrad.store.models import Rollouts, Steps

_RESTORE = "put the committed checkpoint back from a copy"
_WEIGHED = (
    "what was trained cannot be taken back: go on from a checkpoint before it (checkpoint."
    "resume_from), or judge by the metrics whether the step did harm"
)


@dataclass(frozen=True, slots=True)
class _Step:
    """`folder` is its checkpoint's; `began` the step of the weights that it began with (0: the
    model folder's), `state_dir` that of its settings. None: it does not say; without a folder, a
    later step's checkpoint has its weights' update."""

    step: int
    folder: Path | None
    run_id: str | None
    digest: str | None
    parent_digest: str | None
    began: int | None
    state_dir: str | None


def step_checks(connection: Connection) -> Iterator[Finding]:
    steps: dict[int, _Step] = {}
    trained: dict[str, int] = {}  # rollout -> the first step that names it
    for step, batch in _steps(connection):
        steps[step.step] = step
        yield from _trained_twice(step, batch, trained)
    yield from _of_another(connection, steps)
    for step in steps.values():
        yield from _checkpoint(step)
        yield from _parent(step, steps)


def _steps(connection: Connection) -> Iterator[tuple[_Step, Json]]:
    """With what they were made of, {} where that is not known; one in memory at a time."""
    numbers = list(connection.scalars(select(Steps.step).order_by(Steps.step)))
    for number in numbers:
        row = connection.execute(select(*Steps.__table__.columns).where(Steps.step == number)).one()
        batch = row.batch if isinstance(row.batch, dict) else {}
        settings = row.settings if isinstance(row.settings, dict) else {}
        step = _Step(
            step=row.step,
            folder=Path(row.checkpoint) if row.checkpoint else None,
            run_id=row.run_id,
            digest=row.manifest_digest,
            parent_digest=row.parent_digest,
            began=batch.get("weights"),
            state_dir=settings.get("state_dir"),
        )
        yield step, batch


def _trained_twice(step: _Step, batch: Json, trained: dict[str, int]) -> Iterator[Finding]:
    times: Counter[str] = Counter()
    turns: dict[str, int] = {}
    for group in batch.get("groups", ()):
        for rollout in group["rollouts"]:
            times[rollout["rollout_id"]] += 1
            turns[rollout["rollout_id"]] = rollout["turns"]
    twice = sorted(name for name, count in times.items() if count > 1)
    if twice:
        yield Finding(
            check="twice",
            subject=f"step {step.step}",
            message=f"its batch names {len(twice)} rollouts more than once (the first: {twice[0]}, "
            f"{times[twice[0]]} times): it trained {sum(turns[name] for name in twice)} turns of "
            "theirs as often, and they weighed so much more",
            fix=_WEIGHED,
            count=len(twice),
        )
    again = sorted(name for name in times if name in trained)
    if again:
        yield Finding(
            check="twice",
            subject=f"step {step.step}",
            message=f"its batch names {len(again)} rollouts that another step's names too (the "
            f"first: {again[0]}, of step {trained[again[0]]})",
            fix=_WEIGHED,
            count=len(again),
        )
    trained |= {name: step.step for name in times if name not in trained}


def _of_another(connection: Connection, steps: dict[int, _Step]) -> Iterator[Finding]:
    """A trainer's lease names its host, its state folder and, since revision 0007, its run."""
    query = (
        select(
            Rollouts.consumed_step,
            Rollouts.lease_owner,
            func.count(),
            func.min(Rollouts.rollout_id),
        )
        .where(Rollouts.consumed_step.is_not(None), Rollouts.lease_owner.is_not(None))
        .group_by(Rollouts.consumed_step, Rollouts.lease_owner)
        .order_by(Rollouts.consumed_step)
    )
    for number, owner, count, first in connection.execute(query):
        assert number is not None, "as the query asks"
        assert owner is not None, "as the query asks"
        step = steps.get(number)
        if step is None or step.state_dir is None or ":" not in owner:
            continue  # who made it, or who had the lease, is no trainer's
        _, _, place = owner.partition(":")
        if place not in (step.state_dir, f"{step.state_dir}:{step.run_id}"):
            yield Finding(
                check="leases",
                subject=f"step {number}",
                message=f"it consumed {count} rollouts (the first: {first}) that {owner} had "
                f"leased, and was made in {step.state_dir}: its own lease had run out",
                fix="their turns were trained once; what the other trainer made of them was "
                "refused. Raise data.lease_ttl_s, or update the trainer, which renews its leases",
                broken=False,
                count=count,
            )


def _checkpoint(step: _Step) -> Iterator[Finding]:
    """Where it is still on this disk; old ones are dropped, and other machines have theirs."""
    if step.digest is None or (manifest := _manifest(step.folder)) is None:
        return
    found, content = manifest
    if found != step.digest:
        by = f"run {step.run_id}" if step.run_id else "an unknown run"
        yield Finding(
            check="weights",
            subject=f"step {step.step}",
            message=f"{step.folder} is not the checkpoint that it was committed with (by {by}): "
            f"its manifest's digest is {found[:16]}…, not {step.digest[:16]}…",
            fix=f"{_RESTORE}; no program of ours loads this one as step {step.step}'s",
        )
        return
    parent = content.get("parent") or {}
    if content.get("step") != step.step or (
        step.parent_digest is not None and parent.get("digest") != step.parent_digest
    ):
        yield Finding(
            check="weights",
            subject=f"step {step.step}",
            message=f"its checkpoint says that it is of step {content.get('step')} and began with "
            f"the weights of step {parent.get('step', 0)}, and the ledger says otherwise",
            fix="the ledger was changed by hand: restore the last good copy of the store",
        )


def _parent(step: _Step, steps: dict[int, _Step]) -> Iterator[Finding]:
    """That the weights are the chain of committed steps."""
    if step.began is None:
        return
    began = steps.get(step.began)
    before = max((number for number in steps if number < step.step), default=0)
    if step.began >= step.step:
        yield _unchained(step, f"it began with the weights of step {step.began}, a later one")
    elif step.began == 0 and before:
        yield _unchained(step, f"it began with the model folder's weights, after step {before}")
    elif began is not None and step.folder is not None and step.digest is None:
        yield from _other_folder(step, began)
    elif began is not None and step.parent_digest != (
        last := began.parent_digest if began.folder is None else began.digest
    ):
        yield _unchained(
            step,
            f"it began with weights of digest {_short(step.parent_digest)}, and step {step.began} "
            f"was committed with {_short(last)}",
        )
    if 0 < step.began < before:
        yield Finding(
            check="weights",
            subject=f"step {step.step}",
            message=f"it began with the weights of step {step.began}, so the updates of the steps "
            f"after that, up to {before}, are lost",
            fix="right if it was gone on from there on purpose (checkpoint.resume_from)",
            broken=False,
        )


def _other_folder(step: _Step, began: _Step) -> Iterator[Finding]:
    """Of before revision 0007: a folder of another run had a checkpoint of the same number, and
    that one was loaded."""
    if step.folder is None or began.folder is None or step.folder.parent == began.folder.parent:
        return
    own = step.folder.parent / began.folder.name
    theirs, ours = _manifest(began.folder), _manifest(own)
    if theirs is not None and ours is not None and theirs[0] != ours[0]:
        yield _unchained(
            step,
            f"it was made in {step.folder.parent}, which has a {began.folder.name} of its own, "
            f"other than {began.folder} that step {began.step} was committed with: it began with "
            "weights that were never committed",
        )


def _unchained(step: _Step, message: str) -> Finding:
    return Finding(
        check="weights",
        subject=f"step {step.step}",
        message=message,
        fix="its weights, and those of all later steps, are not those of the ledger: go on "
        "from a checkpoint before it (checkpoint.resume_from), in the state folder that made it",
    )


def _manifest(folder: Path | None) -> tuple[str, dict[str, Any]] | None:
    """Its digest and what it says; None: there is no such folder here, or it is another user's."""
    # Unlike pathlib's, this one answers of folders that may not be looked into.
    if folder is None or not os.path.isdir(folder):
        return None
    try:
        content = (folder / MANIFEST_NAME).read_bytes()
        parsed = json.loads(content)
    except PermissionError:
        return None
    except OSError:
        return "missing", {}
    except ValueError:
        parsed = {}
    return manifest_digest(folder), parsed if isinstance(parsed, dict) else {}


def _short(digest: str | None) -> str:
    return "none" if digest is None else f"{digest[:16]}…"
