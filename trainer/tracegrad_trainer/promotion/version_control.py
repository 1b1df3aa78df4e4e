"""Rank 0 acts on what is decided about versions: promotions, rollbacks, pins, pauses.

Decisions come through the store, from whoever can reach it. A thread looks for those that nobody
has acted on, because a step may take minutes and a rollback must not. The training thread is asked
nothing meanwhile; it finds out at its next contact with rank 0's work:

    rollback is served ─► what is being pushed is refused ─► no step is committed any more
                       ─► the ranks end, and go on from the version's checkpoint (`resume_point`)

The lock is held over a commit, and over a rollback: a step is committed before the rollback, and
then known to it (`last_step`), or never.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, RLock, Thread
from typing import Protocol

from tracegrad.events import Json
from tracegrad.store import Decision, Ledger, PolicyVersion, Store, StoreError
from tracegrad.store.read.versions import VersionHistory
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import CheckpointError
from tracegrad_trainer.inference.control_routes import EngineLostError, PushError, ServedWeights
from tracegrad_trainer.promotion.gate import PromotionGate
from tracegrad_trainer.promotion.kept_weights import (
    KeptVersion,
    KeptWeights,
    KeptWeightsError,
)
from tracegrad_trainer.utils.distributed import StopAllRanks

logger = logging.getLogger(__name__)

# A rollback is to be served within a second of the command.
LOOK_EVERY_S = 0.2
GATE_EVERY_LOOKS = 5  # the gate reads rollouts
_LAST_LOOK_S = 10.0
_MOST_BETWEEN = 8


class TrainingRolledBack(StopAllRanks):
    """An earlier version is served: the ranks end, to go on from its checkpoint."""


class Returning(Protocol):
    """What a `WeightPusher` does of it."""

    @property
    def version(self) -> int: ...

    @property
    def newest(self) -> ServedWeights: ...

    @property
    def can_roll_back(self) -> bool: ...

    def roll_back(self, version: int, fetch: Callable[..., ServedWeights]) -> dict[str, float]: ...

    def promote_candidate(self, version: int) -> dict[str, float]: ...

    def serve_base(self, version: int, fetch: Callable[..., ServedWeights]) -> None: ...


class VersionControl:
    """`check_checkpoint`: whether training can go on from a step's checkpoint (0: from the model
    folder's weights); raises CheckpointError. `wanted`: versions that a rollback may go to, or to
    the newest ones before them; they stay on disk."""

    def __init__(
        self,
        settings: TrainerSettings,
        store: Store,
        *,
        run_id: str,
        check_checkpoint: Callable[[int], None],
        wanted: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._wanted = wanted
        self._settings = settings.promotion
        self._store = store
        self._run_id = run_id
        self._check_checkpoint = check_checkpoint
        self._kept = KeptWeights(settings.state_dir / "versions", self._was_kept)
        self._gate: PromotionGate | None = None
        if settings.promotion.gate != "none":
            self._gate = PromotionGate(
                settings.promotion, store, data=settings.data, rewards=settings.rewards
            )
        self._pusher: Returning | None = None
        self._lock = RLock()
        self._pruning = Lock()  # of its own: no commit waits for files that are removed
        self._to_keep: KeptVersion | None = None
        self._rolled_back: str | None = None
        self._hold: str | None = None
        self._looks = 0
        self._said: str | None = None
        self._ending = Event()
        self._thread = Thread(target=self._run, name="version-control", daemon=True)

    # The training thread's side

    def act_before_start(self) -> None:
        """On what was decided while no trainer ran: a rollback is where the run begins. Raises
        StoreError."""
        self._forget_lost()
        for decision in self._store.open_decisions():
            self._act(decision)
        self._rolled_back = None  # nothing had begun
        self._refresh()

    def start(self, pusher: Returning) -> None:
        """Looks for decisions until `close`."""
        self._pusher = pusher
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_LOOK_S)
        self._kept.wait()

    def hold(self) -> str | None:
        """Why nothing may be leased now. Raises TrainingRolledBack."""
        self.check()
        return self._hold

    def check(self) -> None:
        """Raises TrainingRolledBack."""
        if self._rolled_back is not None:
            raise TrainingRolledBack(self._rolled_back)

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Around a commit. Raises TrainingRolledBack."""
        with self._lock:
            self.check()
            yield

    def was_served(
        self, version: int, step: int | None, weights_step: int, *, has_checkpoint: bool
    ) -> None:
        """A push has come to a good end: its weights are kept, beside what goes on. What has no
        checkpoint could not be gone on from, and is not kept."""
        if version in self._kept.versions():
            return  # a run that resumed, with the number that its weights had
        if not has_checkpoint:
            self._note(KeptVersion(version, step, weights_step, self._run_id), "no_checkpoint")
        else:
            with self._lock:
                self._to_keep = KeptVersion(version, step, weights_step, self._run_id)
                self._keep_next()
        if self._gate is not None:
            self._refresh()  # now: no step is made behind a candidate that nobody looked at

    def is_candidate(self, weights_step: int) -> bool:
        """Whether the weights of that step are to be tried on a share of traffic, beside the
        promoted ones, which all engines have then. Raises PushError."""
        if self._settings.gate != "canary":
            return False
        history, pusher = self._store.version_history(), self._pusher
        promoted = history.promoted
        if promoted is None or pusher is None:
            return False
        wanted = history.records[promoted].weights_step
        if wanted == weights_step:
            return False
        served = history.records.get(pusher.version)
        if served is None or served.weights_step != wanted:  # a start, or another was promoted
            try:
                pusher.serve_base(promoted, lambda folder: self._kept.copy_to(promoted, folder))
            except KeptWeightsError as error:
                logger.warning(
                    "version %d is promoted, and cannot be served beside the next one: %s",
                    *(promoted, error),
                )
                return False
        return True

    def fetch_left_served(self, folder: Path) -> ServedWeights | None:
        """Into the folder: the weights that an earlier run left served, to all where some were a
        candidate's; those that were returned to, where nobody served them yet. None: they are not
        kept."""
        try:
            history = self._store.version_history()
            last = Ledger(self._store).last_step()
            base = history.rollback_base(0 if last is None else last.step)
            version = history.serving if base is None else base.version
            if base is None and self._settings.gate == "canary" and history.promoted is not None:
                version = history.promoted
            if version is None or not history.records[version].kept:
                return None
            return self._kept.copy_to(version, folder)
        except (StoreError, KeptWeightsError) as error:
            logger.warning("what was served before this run cannot be served again: %s", error)
            return None

    def await_room(self) -> None:
        """Until the files of an earlier push are read, which take their room until then."""
        self._kept.wait()

    # The looking thread's side

    def look(self) -> None:
        """Once."""
        for decision in self._store.open_decisions():
            if not self._act(decision):
                return  # they are acted on in order
        with self._lock:
            self._keep_next()
        self._looks += 1
        if self._gate is not None and self._looks % GATE_EVERY_LOOKS == 0:
            self._refresh()

    def _run(self) -> None:
        while not self._ending.wait(LOOK_EVERY_S):
            try:
                self.look()
                self._said = None
            except StoreError as error:
                if str(error) != self._said:
                    logger.warning("decisions about versions are not seen: %s", error)
                self._said = str(error)
            except Exception:
                logger.exception("version control goes on after an error")

    def _refresh(self) -> None:
        """Why training is to wait."""
        with self._lock:
            pause = self._store.training_pause()
            if pause is not None:
                self._hold = f"paused by {pause.by}: {pause.reason}"
            elif self._gate is not None and self._pusher is not None:
                self._hold = self._gate.look(self._store.version_history())
            else:
                self._hold = None

    def _act(self, decision: Decision) -> bool:
        """Whether that is done; False: it cannot be yet."""
        assert decision.seq is not None
        try:
            if decision.kind == "rollback":
                outcome = self._roll_back(decision)
                if outcome is None:
                    return False
            else:
                outcome = self._mark(decision)
                self._store.close_decision(decision.seq, outcome)
        except (ValueError, CheckpointError, KeptWeightsError, PushError) as error:
            if isinstance(error, EngineLostError):
                return self._try_again(decision, str(error))
            logger.warning("%s by %s is refused: %s", decision.kind, decision.by, error)
            self._store.close_decision(decision.seq, {"refused": str(error)})
            return True
        logger.info("%s by %s (%s): %s", decision.kind, decision.by, decision.reason, outcome)
        self._refresh()
        if self._pusher is not None:  # before, nobody knows yet what is wanted
            self._prune()
        return True

    def _try_again(self, decision: Decision, why: str) -> bool:
        if why != self._said:
            logger.warning("%s by %s has to wait: %s", decision.kind, decision.by, why)
        self._said = why
        return False

    def _mark(self, decision: Decision) -> Json:
        """Of a decision that changes nothing but how a version, or training, stands. ValueError:
        why it cannot be."""
        if decision.version is None:
            return {}
        history = self._store.version_history()
        if decision.kind == "unpin":
            if decision.version not in history.records:
                history.check_target(decision.version)
            elif not history.records[decision.version].pinned:
                raise ValueError(f"version: {decision.version} is not pinned")
            return {"version": decision.version}
        record = history.check_target(decision.version)
        self._check_checkpoint(record.weights_step)
        outcome: Json = {"version": record.version}
        if decision.kind == "promote" and self._pusher is not None:
            # Where it was served to a share of traffic, all engines get it.
            with self._lock:
                if seconds := self._pusher.promote_candidate(record.version):
                    outcome["seconds"] = seconds
        return outcome

    def _roll_back(self, decision: Decision) -> Json | None:
        """What came of it; None: the engine stands still, or nothing was pushed yet."""
        assert decision.seq is not None
        history = self._store.version_history()
        version = history.rollback_target() if decision.version is None else decision.version
        record = history.check_target(version)
        self._check_checkpoint(record.weights_step)
        pusher = self._pusher
        if pusher is not None and (pusher.version < 0 or not pusher.can_roll_back):
            return None
        with self._lock:
            seconds: dict[str, float] = {}
            if pusher is not None:
                seconds = pusher.roll_back(
                    version, lambda folder: self._kept.copy_to(version, folder)
                )
                detail: Json = {"weights_step": record.weights_step, "seconds": seconds}
                self._store.record_version(
                    PolicyVersion(version, record.step, "serving", detail=detail)
                )
            last = Ledger(self._store).last_step()
            outcome: Json = {
                "version": version,
                "weights_step": record.weights_step,
                "from": history.serving,
                "newest": max(history.records),
                "last_step": 0 if last is None else last.step,
                "served": pusher is not None,
                "seconds": seconds,
            }
            self._store.close_decision(decision.seq, outcome)
            self._rolled_back = (
                f"version {version} is served again, by {decision.by}: {decision.reason}"
            )
        return outcome

    # What is kept

    def _keep_next(self) -> None:
        """What was served last, if it still is."""
        kept, pusher = self._to_keep, self._pusher
        if kept is None or pusher is None or self._kept.busy:
            return
        self._to_keep = None
        newest = pusher.newest  # read once: another may be served meanwhile
        if newest.version != kept.version:
            self._note(kept, "busy")  # the one before was being written all the time
            return
        try:
            self._kept.keep(kept, newest)
        except OSError as error:
            logger.warning("the weights of version %d are not kept: %s", kept.version, error)
            self._note(kept, "no_room" if error.errno == errno.ENOSPC else "not_read")

    def _was_kept(self, kept: KeptVersion, result: int | str) -> None:
        """In the writing thread."""
        try:
            self._note(kept, result)
            self._prune()
        except StoreError as error:
            # Their folder is there; the next run notes it.
            logger.warning("version %d is kept, and not noted: %s", kept.version, error)

    def _note(self, kept: KeptVersion, result: int | str) -> None:
        if isinstance(result, str):
            event = PolicyVersion(kept.version, kept.step, "not_kept", detail={"reason": result})
        else:
            detail = {"bytes": result, "weights_step": kept.weights_step}
            event = PolicyVersion(kept.version, kept.step, "kept", detail=detail)
        self._store.note_version(event)

    def _prune(self) -> None:
        """Removes those beyond `promotion.keep` that nobody wants."""
        with self._pruning:
            # In this order: what a guard wants becomes a decision, and that what is served.
            wanted = self._wanted()
            decided = self._store.open_decisions()
            history = self._store.version_history(())
            self._remove_beyond(history, wanted_on_disk(history, wanted) | _named(decided, history))

    def _remove_beyond(self, history: VersionHistory, wanted: Collection[int]) -> None:
        kept = [one for one in history.records.values() if one.kept]
        newest = {one.version for one in kept[max(0, len(kept) - self._settings.keep) :]}
        for one in kept:
            promoted = history.promoted is not None and history.same_weights(
                one.version, history.promoted
            )
            stays = one.version in newest or one.version in wanted
            if not (stays or one.pinned or one.serving or promoted):
                self._forget(history, one.version, "beyond_keep")

    def _forget(self, history: VersionHistory, version: int, why: str) -> None:
        """Noted first: nobody may be offered what is gone."""
        record = history.records[version]
        event = PolicyVersion(version, record.step, "not_kept", detail={"reason": why})
        self._store.note_version(event)
        self._kept.remove(version)

    def _forget_lost(self) -> None:
        """Folders against the store: versions of steps that were never committed are lost, and what
        was written without being noted is nobody's."""
        history = self._store.version_history()
        there = set(self._kept.versions())
        for record in history.records.values():
            if not record.kept:
                continue
            if record.version not in there:
                self._forget(history, record.version, "gone")
                continue
            try:
                self._check_checkpoint(record.weights_step)
            except CheckpointError:
                self._forget(history, record.version, "no_checkpoint")
        for version in there - {one.version for one in history.records.values() if one.kept}:
            self._kept.remove(version)


def _named(decisions: Collection[Decision], history: VersionHistory) -> set[int]:
    """The versions that these are about, also where a rollback leaves it to the history."""
    found = {one.version for one in decisions if one.version is not None}
    if any(one.kind == "rollback" and one.version is None for one in decisions):
        with suppress(ValueError):
            found.add(history.rollback_target())
    return found


def wanted_on_disk(history: VersionHistory, wanted: Collection[int]) -> set[int]:
    """Of each that is wanted the newest on disk from before it. Of those between the oldest of them
    and the newest version, which may be wanted when the rollouts that they sampled are rewarded,
    some `_MOST_BETWEEN`, evenly."""
    if not wanted:
        return set()
    before = (history.kept_before(version) for version in wanted)
    oldest, newest = min(wanted), max(history.records)
    spacing = 1  # a power of two, so that what stays once stays as the range grows
    while (newest - oldest) // spacing > _MOST_BETWEEN:
        spacing *= 2
    between = {one for one in history.kept() if one >= oldest and one % spacing == 0}
    return between | {one for one in before if one is not None}
