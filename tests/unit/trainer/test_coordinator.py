"""Where training goes on from: the ledger's last step, and numbers that must not come again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tracegrad.store import Ledger, PolicyVersion, StepRecord, Store
from tracegrad_trainer.coordinator import Coordinator, ResumePoint
from tracegrad_trainer.settings import load


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).touch()
    settings = load(None, [f"model={tmp_path}", f"state_dir={tmp_path}"])
    with Store.open(settings.proxy.store) as store:
        yield Coordinator(settings, store, stopping=lambda: False)


def commit(store: Store, step: int, version: int) -> None:
    record = StepRecord(step=step, version=version, checkpoint=f"step-{step}")
    Ledger(store).commit_step(record, trained=[], skipped={}, rollouts=[])


def test_a_new_store_begins_with_the_model_folder(coordinator: Coordinator) -> None:
    assert coordinator.resume_point() == ResumePoint(0, 0, None)


def test_the_last_committed_step_is_gone_on_from(coordinator: Coordinator) -> None:
    commit(coordinator.store, 1, 1)
    commit(coordinator.store, 2, 2)
    coordinator.store.record_version(PolicyVersion(2, 2, "serving"))
    assert coordinator.resume_point() == ResumePoint(2, 2, "step-2")


@pytest.mark.parametrize("steps", [0, 3])
def test_a_failed_versions_number_is_not_served_again(coordinator: Coordinator, steps: int) -> None:
    """Tokens sampled before its push was undone carry it, and must stay untrainable."""
    for step in range(1, steps + 1):
        commit(coordinator.store, step, step)
    coordinator.store.record_version(PolicyVersion(steps, steps or None, "failed"))
    assert coordinator.resume_point().version == steps + 1
