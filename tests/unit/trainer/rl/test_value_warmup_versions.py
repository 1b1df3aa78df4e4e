"""While the value head learns alone the policy keeps its version, and nothing is pushed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from support.trainer.step_samples import trained, trainer_settings
from tracegrad.store import StepHistory, Store
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.rl.serve_worker import ServeWorker


def test_versions_stay_while_the_policy_does(tmp_path: Path) -> None:
    optim = {"lr": 1e-3, "value_warmup_steps": 2}
    settings = trained(tmp_path, 6, 3, objective={"preset": "ppo"}, optim=optim)
    with Store.open(settings.proxy.store) as store:
        steps = sorted(StepHistory(store).steps(), key=lambda one: one.step)
    assert [(one.step, one.version) for one in steps] == [(1, 0), (2, 0), (3, 1)]
    assert [one.metrics["updates_value_only"] for one in steps] == [1, 1, 0]


def test_what_did_not_change_is_not_pushed() -> None:
    """Steps of a value head alone, and one of the policy: one push after the first."""
    tasks = [("train", False), ("train", False), ("train", True), ("stop", False)]

    class Training:
        policy_moved = False
        watch = type("Watch", (), {"lap": staticmethod(lambda stage: None)})

        def resume(self) -> None: ...

        def report_stage(self, stage: str) -> None: ...

        def commit_pending(self) -> None: ...

        def report_served(self, *, stepped: bool) -> None: ...

        def end_intake(self) -> None: ...

        def next_action(self) -> str:
            task, self.policy_moved = tasks.pop(0)
            return task

        def train_batch(self) -> bool:
            return True

    worker = object.__new__(ServeWorker)
    pushes: list[bool] = []
    worker.training = Training()  # type: ignore[assignment]
    worker.control = None
    worker.publisher = SimpleNamespace(engine_stopped=nullcontext)  # type: ignore[assignment]
    worker._await_endpoints = lambda: None  # type: ignore[method-assign]
    worker._check_endpoints = lambda: None  # type: ignore[method-assign]
    worker._publish = lambda: pushes.append(worker.training.policy_moved)  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tracegrad_trainer.rl.serve_worker.run_on_rank_zero", lambda work: work())
        worker.run()
    assert pushes == [False, True]


@pytest.mark.parametrize("name", ["value_lr", "value_warmup_steps"])
def test_an_objective_without_values_refuses_them(tmp_path: Path, name: str) -> None:
    given = trainer_settings(tmp_path).model_dump(exclude_unset=True)
    with pytest.raises(ValidationError, match=rf"optim\.{name}: .* has no value head"):
        TrainerSettings.model_validate(given | {"optim": {name: 1}})
