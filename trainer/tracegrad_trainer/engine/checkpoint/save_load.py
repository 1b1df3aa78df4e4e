"""Checkpoints: model, optimizer, schedule, random numbers and counters, whole or not at all.

A checkpoint is a folder `step-00000012`, written under another name and renamed when every rank
is done. It can be loaded by another number of ranks.

`CheckpointSaver.start` only copies the shards; a thread of each rank writes them while training
goes on, over a process group of its own: collectives of two threads must not meet in one group.
"""

from __future__ import annotations

import copy
import errno
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tracegrad_trainer.engine import random_state
from tracegrad_trainer.engine.checkpoint.manifest import (
    CheckpointError,
    checkpoint_step,
    file_digests,
    fsync_folder,
    list_checkpoints,
    read_manifest,
    verify_contents,
    write_manifest,
)
from tracegrad_trainer.engine.distributed import group_timeout
from tracegrad_trainer.engine.step.learner import Learner
from tracegrad_trainer.engine.step.optimizer import set_implementation

# Weights that are never trained (a LoRA's base) stay in the model folder.
_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


class CheckpointSaver:
    """Writes checkpoints into `root`; one is being written at a time. On every rank."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._group: Any = dist.new_group(backend="gloo", timeout=group_timeout())
        self._first = dist.get_rank() == 0
        self._stager = DefaultStager(_copies())
        self._writing: threading.Thread | None = None
        self._folder = root
        self._error: str | None = None

    def start(
        self,
        learner: Learner,
        step: int,
        counters: dict[str, Any],
        *,
        parent: dict[str, Any] | None = None,
        base: dict[str, Any] | None = None,
    ) -> Path:
        """Copies what checkpoint `step` is made of and begins to write it -> its folder.

        `counters` is JSON-able and comes back from `load_checkpoint`. `parent` (rank 0's counts)
        names the weights that the step began with: {"step", "digest"} of their checkpoint's
        manifest; None: the model folder's. `base` (rank 0's) is a `BaseModelRecord`. What was
        being written before must have been awaited.
        A collective.
        """
        assert self._writing is None, "await the one before"
        self._folder = self.root / f"step-{step:08d}"
        state = _state(learner)
        state[f"random-{dist.get_rank()}"] = random_state.capture_rng_state()
        copied = self._stager.stage(state)
        assert isinstance(copied, dict)
        # Copied too: the caller goes on counting while this is written.
        own = {
            "step": step,
            "parent": parent,
            "base": base,
            "optimizer_steps": learner.steps,
            "entropy_coef": learner.adapted_entropy_coef,
            "counters": copy.deepcopy(counters),
        }
        bound = sum(p.numel() * p.element_size() for p in learner.model.parameters())
        # Until the thread replaces it: one that dies of an unforeseen error has written nothing.
        self._error = "its writer ended early (the log says of what)"
        self._writing = threading.Thread(
            target=self._write,
            args=(copied, own, bound, learner.device),
            name="checkpoint",
            daemon=True,
        )
        self._writing.start()
        return self._folder

    @property
    def busy(self) -> bool:
        """Whether what was started is still being written."""
        return self._writing is not None and self._writing.is_alive()

    def wait(self) -> None:
        """Until the checkpoint is whole and on the disk; nothing to do where none was started.

        Raises:
            CheckpointError: on every rank, when any could not write; no partial folder stays.
        """
        if self._writing is None:
            return
        self._writing.join()
        self._writing = None
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"checkpoint {self._folder} not written: {error}")

    def prune(
        self,
        *,
        keep: int,
        keep_every: int | None = None,
        counts: Callable[[Path], bool] = lambda _: True,
        protected: Collection[int] = (),
    ) -> None:
        """Drops old checkpoints: the newest `keep` stay, every `keep_every`th, and those of the
        steps `protected`. Those that do not count (one that a kill left before its commit) go with
        the counted ones around them.

        Those of later steps than the last one that was started stay too, and do not count: they
        are of another store or of a time before a restore, and would push out the one just made.
        """
        if not self._first:
            return
        last = None if self._folder == self.root else checkpoint_step(self._folder)
        made = [
            one
            for one in list_checkpoints(self.root)
            if last is None or checkpoint_step(one) <= last
        ]
        for old in reversed(made):
            if keep > 0:
                keep -= counts(old)
            elif checkpoint_step(old) in protected:
                continue
            elif not (keep_every and checkpoint_step(old) % keep_every == 0):
                shutil.rmtree(old, ignore_errors=True)

    def _write(
        self, state: dict[str, Any], own: dict[str, Any], bound: int, device: torch.device
    ) -> None:
        """In the thread: every rank its part, then rank 0 the manifest and the name."""
        if device.type == "cuda":
            # A thread begins with the first GPU: torch's writer would open a context there.
            torch.cuda.set_device(device)
        partial = self.root / f".{self._folder.name}.partial"
        error = self._on_first(lambda: _fresh(partial))
        if error is None:
            try:
                save(state, checkpoint_id=partial, process_group=self._group)
            except CheckpointException as caught:
                error = root_cause(caught)
        if error is None:
            files = self._all_digests(partial)
            error = self._on_first(lambda: _finish(partial, self._folder, own, files))
        if error is not None:
            error = self._on_first(lambda: _refuse_full_disk(self.root, bound)) or error
            if self._first:
                shutil.rmtree(partial, ignore_errors=True)
        self._error = error

    def _all_digests(self, folder: Path) -> dict[str, list[int]]:
        """Of every rank's files; each reads its own."""
        mine = file_digests(folder, f"__{dist.get_rank()}_*")
        everyone: list[dict[str, list[int]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine, group=self._group)
        return {name: found for one in everyone for name, found in one.items()}

    def _on_first(self, work: Callable[[], None]) -> str | None:
        """Do `work` on rank 0; every rank learns what went wrong, if anything."""
        error: list[str | None] = [None]
        if self._first:
            try:
                work()
            except OSError as caught:
                error = [str(caught)]
        dist.broadcast_object_list(error, src=0, group=self._group)
        return error[0]


def load_checkpoint(
    learner: Learner, folder: Path | str, *, digest: str | None = None
) -> dict[str, Any]:
    """Load into model, optimizer and random number generators, on all ranks -> the counters it
    was saved with.

    Ranks that it was not saved by keep the random numbers that they have. `digest` is what the
    manifest's must be: that of the committed step whose checkpoint it is.

    Raises:
        CheckpointError: a part of it is missing or damaged (named), or it is of another model, or
            not the one that was committed.
    """
    folder = Path(folder)
    own = read_manifest(folder, digest=digest)
    verify_contents(folder, share=(dist.get_rank(), dist.get_world_size()))
    state = _state(learner)
    template = {**state, (key := f"random-{dist.get_rank()}"): ""}
    _load(template, folder, planner=_Strict({key}))
    set_state_dict(
        learner.model,
        learner.optimizer,
        model_state_dict=template["model"],
        optim_state_dict=template["optimizer"],
        options=_OPTIONS,
    )
    set_implementation(learner.optimizer, learner.adamw)
    if template[key]:
        random_state.restore_rng_state(template[key])
    learner.steps = own["optimizer_steps"]
    if learner.adapted_entropy_coef is not None:
        # None: that run had no target, so it begins here.
        learner.entropy_coef = own.get("entropy_coef") or learner.entropy_coef
    counters: dict[str, Any] = own["counters"]
    return counters


def load_weights(state: dict[str, Any], folder: Path, *, digest: str | None = None) -> None:
    """The model's weights of a checkpoint into the tensors of `state` (name -> tensor), in one
    process, without a process group.

    Raises:
        CheckpointError: as `load_checkpoint`.
    """
    read_manifest(folder, digest=digest)
    verify_contents(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose
        _load({"model": state}, folder, no_dist=True)


def _load(state: dict[str, Any], folder: Path, **how: Any) -> None:
    try:
        load(state, checkpoint_id=folder, **how)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {folder} not read: {error}") from error
    except CheckpointException as error:
        raise CheckpointError(f"checkpoint {folder} not read: {root_cause(error)}") from error


class _Strict(DefaultLoadPlanner):
    """All keys must be there but for `optional` ones, which stay as they are."""

    def __init__(self, optional: set[str]) -> None:
        super().__init__()
        self.optional = optional

    def create_local_plan(self) -> Any:
        assert self.metadata is not None
        for key in self.optional - self.metadata.state_dict_metadata.keys():
            self.state_dict.pop(key, None)
        return super().create_local_plan()


def root_cause(error: CheckpointException) -> str:
    causes = {
        str(cause[0] if isinstance(cause, tuple) else cause) for cause in error.failures.values()
    }
    return "; ".join(sorted(causes))


def _state(learner: Learner) -> dict[str, Any]:
    """Weights that have several names (a head tied to the embedding) under the first of them.
    Earlier checkpoints have them under each; what is not asked for is not read."""
    model, optimizer = get_state_dict(learner.model, learner.optimizer, options=_OPTIONS)
    once = {name for name, _ in learner.model.named_parameters()}
    for name, _ in learner.model.named_parameters(remove_duplicate=False):
        if name not in once:
            model.pop(name, None)
    return {"model": model, "optimizer": optimizer}


def _copies() -> StagingOptions:
    """From a GPU through pinned memory, which is kept from one checkpoint to the next, at the speed
    of its bus; training waits for these copies, not for the disk."""
    gpu = torch.cuda.is_available()
    return StagingOptions(
        use_pinned_memory=gpu,
        use_non_blocking_copy=gpu,  # of all tensors, awaited together
        use_shared_memory=False,
        use_async_staging=False,  # the next optimizer step would change what is copied
    )


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _finish(partial: Path, folder: Path, own: dict[str, Any], files: dict[str, list[int]]) -> None:
    write_manifest(partial, own, files)
    if folder.exists():  # of a step that was killed before it was committed
        shutil.rmtree(folder)
    os.replace(partial, folder)
    fsync_folder(folder.parent)


def _refuse_full_disk(root: Path, weights: int) -> None:
    """OSError if the disk is full: torch's own error does not name that cause."""
    if shutil.disk_usage(root).free < 3 * weights:  # and two moments of each
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root))
