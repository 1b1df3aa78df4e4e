"""Which version the store has as served, and when pushes that fail end a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tracegrad.store import PolicyVersion
from tracegrad_trainer.inference.control_routes import PushError, ServedWeights
from tracegrad_trainer.inference.publish import PublishResult
from tracegrad_trainer.promotion.version_control import TrainingRolledBack
from tracegrad_trainer.rl import serve_worker
from tracegrad_trainer.rl.serve_worker import ServeWorker

SERVED: dict[str, Any] = {}
FAILED: dict[str, Any] = {"error": "off by 3 nats"}
LOST: dict[str, Any] = {"error": "vLLM is gone", "lost": True}
SUPERSEDED: dict[str, Any] = {"error": "not wanted any more", "superseded": True}


class Run:
    """A worker whose pushes end as they are given; each push is of the next version."""

    def __init__(self, *outcomes: dict[str, Any], limit: int = 2) -> None:
        self.outcomes = list(outcomes)
        self.recorded: list[PolicyVersion] = []
        self.metered: list[PolicyVersion] = []
        self.kept: list[int] = []
        self.commits = 0
        self.newest = ServedWeights(-1, ())
        self.rolled_back = False
        self.training: Any = SimpleNamespace(
            version=0,
            step=0,
            trained_rows=(),
            base_model=None,
            watch=SimpleNamespace(lap=lambda stage: None),
            pending=SimpleNamespace(last=0, has_checkpoint=lambda step: True),
            store=SimpleNamespace(record_version=self.recorded.append),
            sinks=SimpleNamespace(pushed=self.metered.append),
            report_stage=lambda stage: None,
            commit_pending=self._commit,
        )
        self.worker = worker = object.__new__(ServeWorker)
        worker.training = self.training
        worker.serves, worker.failed_pushes = False, 0
        settings: Any = SimpleNamespace(
            push=SimpleNamespace(failures_in_a_row=limit), promotion=SimpleNamespace(gate="none")
        )
        control: Any = SimpleNamespace(
            was_served=lambda version, *_, **__: self.kept.append(version),
            is_candidate=lambda step: False,
            check=self._check,
        )
        worker.settings, worker.control = settings, control
        self.did: list[str] = []
        publisher: Any = SimpleNamespace(
            pusher=self, publish=self._publish, free_memory=lambda: self.did.append("free memory")
        )
        worker.publisher = publisher
        worker._await_endpoints = lambda: self.did.append("wait")  # type: ignore[method-assign]

    def push(self, count: int) -> None:
        for _ in range(count):
            self.worker._publish()
            self.training.version += 1
            self.training.step += 1
            self.training.trained_rows = ("a row",)

    def states(self) -> list[tuple[int, str]]:
        return [(one.version, one.state) for one in self.recorded]

    def _publish(self, version: int, rows: object, *, as_candidate: bool) -> PublishResult:
        self.did.append("publish")
        outcome = self.outcomes.pop(0)
        if not outcome:
            self.newest = ServedWeights(version, ())
        return PublishResult(version, None, None, 1.0, **outcome)

    def _commit(self) -> None:
        self.commits += 1

    def _check(self) -> None:
        if self.rolled_back:
            raise TrainingRolledBack("version 1 was returned to")


@pytest.fixture(autouse=True)
def rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_worker, "run_on_rank_zero", lambda work: work())


def test_a_version_is_served_or_failed_and_the_run_goes_on() -> None:
    run = Run(SERVED, FAILED, SERVED, FAILED, SERVED)
    run.push(5)
    pushed = [(1, "failed"), (2, "serving"), (3, "failed"), (4, "serving")]
    assert run.states()[0] == (0, "serving"), "the model folder's, of no step"
    assert run.states()[1:] == [one for v, state in pushed for one in ((v, "pushing"), (v, state))]
    assert [(one.version, one.state) for one in run.metered] == [(0, "serving"), *pushed]
    assert run.kept == [0, 2, 4]
    assert [one.step for one in run.metered] == [None, 1, 2, 3, 4]
    errors = [(one.detail or {})["error"] for one in run.metered]
    assert errors == [None, "off by 3 nats", None, "off by 3 nats", None]
    assert run.commits == 0


def test_the_ranks_memory_is_free_before_they_wait_for_vllm() -> None:
    """One that has ended meanwhile does not start without it."""
    run = Run(SERVED)
    run.push(1)
    assert run.did == ["free memory", "wait", "publish"]


def test_weights_whose_push_failed_are_not_kept_when_they_are_saved() -> None:
    run = Run(SERVED, SERVED, FAILED)
    run.push(2)
    run.training.version -= 1  # as it was at the push
    run.worker._keep()
    assert run.kept == [0, 1, 1]
    run.training.version += 1
    run.worker._publish()
    run.worker._keep()
    assert run.kept == [0, 1, 1]


@pytest.mark.parametrize(
    ("outcomes", "pushes"),
    [
        ([FAILED], 1),  # a first one: nobody knows what is served
        ([SERVED, FAILED, FAILED], 3),
        ([SERVED, FAILED, SERVED, FAILED, FAILED], 5),
        ([SERVED, LOST], 2),
    ],
)
def test_pushes_that_fail_end_a_run_whose_steps_are_committed(
    outcomes: list[dict[str, Any]], pushes: int
) -> None:
    run = Run(*outcomes)
    run.push(pushes - 1)
    assert run.commits == 0
    with pytest.raises(PushError, match=outcomes[-1]["error"]):
        run.push(1)
    assert run.commits == 1
    assert run.states()[-1] == (pushes - 1, "failed")


def test_a_push_that_a_rollback_overtook_has_not_failed() -> None:
    run = Run(SERVED, SUPERSEDED)
    run.push(1)
    run.rolled_back = True
    with pytest.raises(TrainingRolledBack):
        run.push(1)
    assert run.states()[-2:] == [(1, "pushing"), (1, "superseded")]
    assert (run.kept, run.commits) == ([0], 0)


def test_no_collective_lasts_until_vllm_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait in it, and `fsdp.timeout_s` is over before a large model is loaded."""
    seconds, answers, asked = 0.0, iter([False] * 20 + [True] * 2), []

    def sleep(count: float) -> None:
        nonlocal seconds
        seconds += count + 1

    def on_rank_zero(work: Any) -> Any:
        before = seconds
        try:
            return work()
        finally:
            asked.append(seconds - before)

    monkeypatch.setattr(serve_worker, "run_on_rank_zero", on_rank_zero)
    monkeypatch.setattr(
        serve_worker, "why_silent", lambda *_: None if next(answers) else "it answers 503"
    )
    clock = SimpleNamespace(monotonic=lambda: seconds, sleep=sleep)
    monkeypatch.setattr(serve_worker, "time", clock)
    for name in ("check_engines", "check_served_tokenizer"):
        monkeypatch.setattr(serve_worker, name, lambda *_: None)
    run = Run()
    worker = run.worker
    del worker._await_endpoints
    worker.stopping = lambda: False
    run.training.resume = lambda: None
    run.training.next_action = lambda: "stop"
    run.training.report_served = lambda **_: None
    run.training.end_intake = lambda: None
    worker.settings = SimpleNamespace(  # type: ignore[assignment]
        engine_urls=["http://a"],
        url="http://b",
        vllm=SimpleNamespace(is_attached=False, urls=()),
        push=SimpleNamespace(engines=()),
    )
    monkeypatch.setattr(worker, "_publish", lambda: None)
    worker.control = None
    worker._run()
    assert seconds > 10
    assert max(asked) <= serve_worker.PATIENCE_S + 1.2
