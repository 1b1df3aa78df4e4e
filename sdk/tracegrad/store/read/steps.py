"""Steps that were committed, and what they trained: read, never changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Select, Text, cast, func, select

from tracegrad.store.models import Rollouts, RolloutTags, Steps, TurnLedger
from tracegrad.store.read.training_samples import load_samples
from tracegrad.store.read.turn_scopes import load_turn_scopes
from tracegrad.store.rows import count_rows, load, rows_of_keys, select_fields
from tracegrad.store.types import Readable, RolloutSample, StepRecord
from tracegrad.turn_scopes import TurnScope

# Settings and batches are large: a step trains on thousands of rollouts.
_SUMMARY_COLUMNS = (
    Steps.step,
    Steps.version,
    Steps.created_at,
    Steps.metrics,
    Steps.checkpoint,
    Steps.run_id,
    Steps.manifest_digest,
    Steps.parent_digest,
)


class StepHistory:
    """For those who look back. Steps without settings and batches, unless one is asked for."""

    def __init__(self, store: Readable) -> None:
        self._store = store

    def steps(self, limit: int | None = None) -> list[StepRecord]:
        """The last `limit` steps, the oldest of them first."""
        return self._read(select(*_SUMMARY_COLUMNS).order_by(Steps.step.desc()).limit(limit))[::-1]

    def page(self, limit: int, *, before: int | None = None) -> list[StepRecord]:
        """`limit` steps, the newest first; `before`: of those before this one."""
        query = select(*_SUMMARY_COLUMNS).order_by(Steps.step.desc()).limit(limit)
        return self._read(query if before is None else query.where(Steps.step < before))

    def numbers(self, limit: int) -> list[int]:
        """Of the last `limit` steps, in order."""
        query = select(Steps.step).order_by(Steps.step.desc()).limit(limit)
        with self._store.reading() as connection:
            return list(connection.scalars(query))[::-1]

    def of_numbers(self, numbers: Collection[int]) -> list[StepRecord]:
        """These steps, in order."""
        with self._store.reading() as connection:
            rows = rows_of_keys(connection, select(*_SUMMARY_COLUMNS), Steps.step, numbers)
            found = [StepRecord(**row._mapping) for row in rows]
        return sorted(found, key=lambda one: one.step)

    def newest(self) -> int | None:
        """The last step's number."""
        with self._store.reading() as connection:
            return connection.scalar(select(func.max(Steps.step)))

    def neighbours(self, step: int) -> tuple[int | None, int | None]:
        """The numbers of the steps before and after one."""
        before = select(func.max(Steps.step)).where(Steps.step < step)
        after = select(func.min(Steps.step)).where(Steps.step > step)
        with self._store.reading() as connection:
            return connection.scalar(before), connection.scalar(after)

    def count_after(self, step: int) -> int:
        """Steps that were committed since."""
        with self._store.reading() as connection:
            return count_rows(connection, Steps, Steps.step > step)

    def after(self, step: int) -> list[StepRecord]:
        """The steps after this one, in order."""
        return self._read(select(*_SUMMARY_COLUMNS).where(Steps.step > step).order_by(Steps.step))

    def count(self) -> int:
        with self._store.reading() as connection:
            return count_rows(connection, Steps)

    def step(self, step: int) -> StepRecord | None:
        """With its settings and its batch."""
        found = self._read(select_fields(StepRecord, Steps).where(Steps.step == step))
        return found[0] if found else None

    def before(self, step: int) -> StepRecord | None:
        """The last step before it: whose weights it began with."""
        query = (
            select(*_SUMMARY_COLUMNS).where(Steps.step < step).order_by(Steps.step.desc()).limit(1)
        )
        found = self._read(query)
        return found[0] if found else None

    def with_digest(self, digest: str) -> StepRecord | None:
        """The step whose checkpoint's manifest has this digest."""
        found = self._read(select(*_SUMMARY_COLUMNS).where(Steps.manifest_digest == digest))
        return found[0] if found else None

    def last_checkpoint_before(self, step: int) -> StepRecord | None:
        """The last step before it that has a checkpoint."""
        query = (
            select(*_SUMMARY_COLUMNS)
            .where(Steps.step < step, Steps.checkpoint.is_not(None))
            .order_by(Steps.step.desc())
            .limit(1)
        )
        found = self._read(query)
        return found[0] if found else None

    def first_checkpoint_after(self, step: int) -> StepRecord | None:
        """The first step behind it that has a checkpoint: that one has its weights' updates too."""
        query = (
            select(*_SUMMARY_COLUMNS)
            .where(Steps.step > step, Steps.checkpoint.is_not(None))
            .order_by(Steps.step)
            .limit(1)
        )
        found = self._read(query)
        return found[0] if found else None

    def steps_with_batch(self, limit: int) -> set[int]:
        """Which of the last `limit` steps say what they were made of."""
        # Nothing is stored as NULL or as JSON's null.
        known = func.length(cast(Steps.batch, Text)) > len("null")
        query = select(Steps.step, known).order_by(Steps.step.desc()).limit(limit)
        with self._store.reading() as connection:
            return {step for step, is_known in connection.execute(query) if is_known}

    def turns_trained(self, step: int) -> set[str]:
        """Ids of the turns that it trained; those of removed rollouts are gone."""
        query = select(TurnLedger.turn_id).where(TurnLedger.step == step)
        with self._store.reading() as connection:
            return set(connection.scalars(query))

    def count_trained(self, steps: Collection[int]) -> dict[int, int]:
        """Turns that each of the steps trained, those of removed rollouts left out."""
        query = (
            select(TurnLedger.step, func.count())
            .where(TurnLedger.step.in_(steps))
            .group_by(TurnLedger.step)
        )
        with self._store.reading() as connection:
            found = {step: count for step, count in connection.execute(query) if step is not None}
        return {step: found.get(step, 0) for step in steps}

    def samples(
        self, rewards: Mapping[str, float], *, expert_routing: bool = True
    ) -> dict[str, RolloutSample]:
        """Finished rollouts by id, with these rewards; removed ones are gone. `expert_routing`:
        with the routed experts of their turns."""
        with self._store.reading() as connection:
            return load_samples(connection, rewards, expert_routing=expert_routing)

    def turn_scopes(self, rollout_ids: Sequence[str]) -> dict[str, TurnScope]:
        """Of all their turns, by id."""
        with self._store.reading() as connection:
            return load_turn_scopes(connection, rollout_ids)

    def splits(self) -> list[str]:
        """The values of the tag `split`, "" first if finished rollouts have none."""
        tagged = select(RolloutTags.value).where(RolloutTags.key == "split").distinct()
        bare = (
            select(Rollouts.rollout_id)
            .where(
                Rollouts.finished_at.is_not(None),
                ~select(RolloutTags.rollout_id)
                .where(RolloutTags.rollout_id == Rollouts.rollout_id, RolloutTags.key == "split")
                .exists(),
            )
            .limit(1)
        )
        with self._store.reading() as connection:
            found = sorted(connection.scalars(tagged))
            return [""] * (connection.scalar(bare) is not None) + found

    def _read(self, query: Select[tuple[object, ...]]) -> list[StepRecord]:
        with self._store.reading() as connection:
            return load(connection, StepRecord, query)
