"""What `tracegrad.run` is asked for, and what of it cannot be."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from tracegrad.runner.function_attempt import Reward

# Numbers by the least that they may be.
_COUNTS: Mapping[int, Sequence[str]] = {
    0: ("over_sample", "retries"),
    1: ("attempts", "epochs", "steps", "eval_every", "eval_attempts", "patience", "concurrency"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """As of `run`."""

    train: Iterable[Any] = ()
    val: Sequence[Any] = ()
    reward: Reward | None = None
    attempts: int | None = None
    over_sample: int = 0
    epochs: int = 1
    steps: int | None = None
    eval_every: int | None = None
    eval_attempts: int = 1
    stop_at: float | None = None
    patience: int | None = None
    concurrency: int = 32
    retries: int = 2
    timeout_s: float | None = None
    error_reward: float | None = 0.0
    infra_errors: tuple[type[Exception], ...] = ()
    tags: Mapping[str, object] = field(default_factory=lambda: {"split": "train"})
    name: str | None = None
    task_id: Callable[[Any], str] | None = None
    folder: Path | str | None = None
    resume: Path | str | None = None
    ray: str | None = None
    ray_resources: Mapping[str, float] = field(default_factory=dict)
    said: Callable[[str], object] = print

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for least, names in _COUNTS.items():
            for name in names:
                value = getattr(self, name)
                if value is not None and not _is_count(value, least):
                    raise ValueError(f"{name}: {value!r:.60} is not {least} or more")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s: {self.timeout_s} is not more than 0")
        if _goes_by_once("val", self.val):
            raise ValueError("val: an iterator goes by once, and is asked again; give a list")
        if _goes_by_once("train", self.train) and self.epochs > 1:
            raise ValueError("epochs: train is an iterator, which goes by once; give a list")
        for name in ("eval_every", "stop_at", "patience"):
            if getattr(self, name) is None:
                continue
            if not self.val:
                raise ValueError(f"{name}: needs held-out tasks; give val=")
            if self.eval_every is None:
                raise ValueError(f"{name}: needs evaluations meanwhile; give eval_every=")
        if self.resume is not None and self.folder is not None:
            raise ValueError("folder: resume names it already")
        if self.ray_resources and self.ray is None:
            raise ValueError("ray_resources: there is no ray; give the cluster's address")
        for name, amount in self.ray_resources.items():
            if not 0 <= amount < math.inf:
                raise ValueError(f"ray_resources: {name} = {amount} is not an amount")


def _is_count(value: Any, least: int) -> bool:
    try:
        return operator.index(value) >= least
    except TypeError:
        return False


def _goes_by_once(name: str, tasks: Any) -> bool:
    """Raises ValueError: these are no tasks. A text is one letter after another."""
    try:
        found = iter(tasks)
    except TypeError:
        found = None
    if found is None or isinstance(tasks, str | bytes):
        raise ValueError(f"{name}: {tasks!r:.60} is no list of tasks")
    return found is tasks


class RunOptions(TypedDict, total=False):
    """As of `run`."""

    train: Iterable[Any]
    val: Sequence[Any]
    reward: Reward | None
    attempts: int | None
    over_sample: int
    epochs: int
    steps: int | None
    eval_every: int | None
    eval_attempts: int
    stop_at: float | None
    patience: int | None
    concurrency: int
    retries: int
    timeout_s: float | None
    error_reward: float | None
    infra_errors: tuple[type[Exception], ...]
    tags: Mapping[str, object]
    name: str | None
    task_id: Callable[[Any], str] | None
    folder: Path | str | None
    resume: Path | str | None
    ray: str | None
    ray_resources: Mapping[str, float]
    said: Callable[[str], object]
