"""A store, a folder of kept weights and an engine that only counts: what a rollback needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tracegrad.store import Decision, PolicyVersion, StepRecord, Store
from tracegrad.store.ledger.ledger import Ledger
from tracegrad_trainer.config.data import DataSettings
from tracegrad_trainer.config.promotion import PromotionSettings
from tracegrad_trainer.engine import CheckpointError
from tracegrad_trainer.inference.control_routes import PushError, ServedWeights
from tracegrad_trainer.promotion.version_control import VersionControl
from tracegrad_trainer.rewards.config import RewardSettings


@dataclass
class CountingPusher:
    """As a `WeightPusher`: serves what it is given, at once. `newest` is the candidate, where there
    is one."""

    folder: Path
    base: ServedWeights = field(default_factory=lambda: ServedWeights(-1, ()))
    newest: ServedWeights = field(default_factory=lambda: ServedWeights(-1, ()))
    can_roll_back: bool = True
    refuses: str | None = None
    loaded: list[float] = field(default_factory=list)

    @property
    def version(self) -> int:
        return self.base.version

    def push(self, version: int, value: float, *, as_candidate: bool = False) -> None:
        target = self.folder / str(version)
        target.mkdir(parents=True, exist_ok=True)
        save_file({"w": torch.tensor([value])}, target / "0.safetensors")
        new = ServedWeights(version, (str(target / "0.safetensors"),))
        self.take(new, base=self.base if as_candidate else new)

    def take(self, newest: ServedWeights, base: ServedWeights) -> None:
        self.newest, self.base = newest, base
        self.loaded.append(float(load_file(newest.paths[0])["w"]))

    def promote_candidate(self, version: int) -> dict[str, float]:
        if self.refuses is not None:
            raise PushError(self.refuses)
        if version != self.newest.version or version == self.version:
            return {}
        self.base = self.newest
        return {"load": 0.0}

    def serve_base(self, version: int, fetch: Callable[[Path], ServedWeights]) -> None:
        found = fetch(self.folder / f"base-{version}")
        self.take(found, base=found)

    def roll_back(self, version: int, fetch: Callable[[Path], ServedWeights]) -> dict[str, float]:
        if self.refuses is not None:
            raise PushError(self.refuses)
        found = fetch(self.folder / f"back-{version}")
        self.take(found, base=found)
        return {"load": 0.0}


class ServedRun:
    """Versions 0, 1, 2, ... of steps of these numbers; the weight of a version is its number."""

    def __init__(
        self, store: Store, tmp_path: Path, rewards: RewardSettings | None = None, **promotion: Any
    ) -> None:
        self.store = store
        self.state_dir = tmp_path / "state"
        self.promotion = PromotionSettings(**promotion)
        self.rewards = rewards or RewardSettings()
        (tmp_path / "scratch").mkdir(parents=True, exist_ok=True)
        self.pusher = CountingPusher(tmp_path / "scratch")
        self.no_checkpoint: set[int] = set()
        self.wanted: set[int] = set()  # by guards
        self.control = self.begin()
        self.control._pusher = self.pusher

    def begin(self) -> VersionControl:
        """As a run that starts; its thread does not run, `look` is called."""
        settings: Any = SimpleNamespace(
            promotion=self.promotion,
            state_dir=self.state_dir,
            data=DataSettings(),
            rewards=self.rewards,
        )
        return VersionControl(
            settings,
            self.store,
            run_id="run",
            check_checkpoint=self.check_checkpoint,
            wanted=lambda: self.wanted,
        )

    def begin_again(self) -> VersionControl:
        """As after a restart."""
        control = self.begin()
        control.act_before_start()
        return control

    def check_checkpoint(self, step: int) -> None:
        if step in self.no_checkpoint:
            raise CheckpointError(f"step {step} has no checkpoint of its own")

    def serve(self, *versions: int, commit: bool = True) -> None:
        """Each is made by the step of its number, committed, pushed and kept."""
        for version in versions:
            if version and commit:
                made = StepRecord(step=version, version=version)
                Ledger(self.store).commit_step(made, trained=[], skipped={}, rollouts=[])
            tried = self.control.is_candidate(version)
            self.pusher.push(version, float(version), as_candidate=tried)
            detail = {"weights_step": version, "gate": self.promotion.gate}
            self.store.record_version(
                PolicyVersion(version, version or None, "serving", detail=detail)
            )
            has = version not in self.no_checkpoint
            self.control.was_served(version, version or None, version, has_checkpoint=has)
            self.control._kept.wait()

    def decide(self, kind: Any, version: int | None = None, **more: Any) -> Decision:
        """And it is acted on, or not."""
        if kind == "rollback":
            more = {"training": "continue"} | more
        given = Decision(kind=kind, version=version, by="ann@host", reason="tested", **more)
        seq = self.store.decide(given)
        self.control.look()
        return self.store.decisions(after=seq - 1)[0]

    def kept(self) -> list[int]:
        return self.store.version_history().kept()

    def states(self) -> dict[int, str]:
        return {one.version: one.state for one in self.store.version_history().records.values()}
