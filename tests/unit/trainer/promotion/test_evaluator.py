"""A task file is run against the version that the gate looks at, as long as it does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engines.mock_engine import MockEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, proxy_with_engine
from support.proxy.servers import EngineServer, eventually, serving
from support.trainer.step_samples import trainer_settings
from tracegrad.store import Decision, PolicyVersion, RolloutSummary, Store
from tracegrad.store.read.held_out import VERSION_TAG
from tracegrad_trainer.cli.serve import check_startup
from tracegrad_trainer.config.promotion import PromotionSettings
from tracegrad_trainer.launch.run_state import is_at_work, read_state
from tracegrad_trainer.launch.session import StartError
from tracegrad_trainer.promotion.evaluator import (
    Evaluator,
    EvaluatorTotals,
    check_tasks,
    run_command,
)

WITHIN_S = 120.0
ASK = """
import os, openai
client = openai.OpenAI(max_retries=0)
client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
"""


def evaluator(wanted: list[int | None], code: str, said: list[EvaluatorTotals]) -> Evaluator:
    """Looks at what is wanted in turn; the last one stays."""

    def look() -> int | None:
        return wanted.pop(0) if len(wanted) > 1 else wanted[0]

    return Evaluator(
        look, lambda _: [sys.executable, "-c", code], lambda _, totals: said.append(totals)
    )


async def test_a_pass_ends_with_its_tasks_and_what_fails_is_said() -> None:
    said: list[EvaluatorTotals] = []
    made = evaluator([3], "raise SystemExit(1)", said)
    assert await made.evaluate(3), "some attempt was not scored"
    made = evaluator([3], "raise SystemExit(2)", said)
    assert not await made.evaluate(3)
    assert made.totals == EvaluatorTotals(
        passes=1, failed=1, error="`tracegrad run` ended with exit code 2: see logs/evaluator.log"
    )


@pytest.mark.parametrize("after", [None, 4])
async def test_a_pass_is_cut_short_once_nothing_more_is_wanted(
    after: int | None, tmp_path: Path
) -> None:
    began, ended = tmp_path / "began", tmp_path / "ended"
    code = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(ended)!r}).touch(), "
        "sys.exit(130)))\n"
        f"pathlib.Path({str(began)!r}).touch()\n"
        "time.sleep(600)\n"
    )

    def look() -> int | None:
        return after if began.exists() else 3

    made = Evaluator(look, lambda _: [sys.executable, "-c", code], lambda *_: None)
    assert await made.evaluate(3)
    assert ended.exists(), "the runner ends its agents"
    assert made.totals.failed == 0


async def test_who_is_stopped_leaves_no_runner(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid()));"
    made = evaluator([3], code + "time.sleep(600)", [])
    running = asyncio.create_task(made.run())
    while not (pid.exists() and pid.read_text()):  # noqa: ASYNC110 (a process writes it)
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_tasks_that_cannot_be_run_are_named(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    settings = PromotionSettings(gate="held_out", tasks=file)
    with pytest.raises(ValueError, match=r"promotion.tasks: .*tasks.jsonl"):
        check_tasks(settings)
    file.write_text('{"id": "a", "prompt": "hi"}\n')
    with pytest.raises(ValueError, match=r"promotion.tasks: .*command"):
        check_tasks(settings)
    check_tasks(settings.model_copy(update={"command": ("./agent.sh", "{prompt}")}))
    check_tasks(PromotionSettings())


def test_the_command_is_that_of_the_runner(tmp_path: Path) -> None:
    settings = PromotionSettings(
        gate="held_out", tasks=Path("t.jsonl"), command=("./agent.sh", "{prompt}")
    )
    assert run_command(settings, 7, tmp_path)[1:] == [
        "-m", "tracegrad.cli", "run", "t.jsonl", "--eval", "--tag", "evaluated_version=7",
        "--logs", str(tmp_path), "--", "./agent.sh", "{prompt}",
    ]  # fmt: skip


def test_serve_refuses_tasks_that_cannot_be_run_before_anything_starts(tmp_path: Path) -> None:
    promotion = {"gate": "held_out", "tasks": tmp_path / "none.jsonl"}
    settings = trainer_settings(tmp_path, promotion=promotion)
    with (
        Store.open(settings.proxy.store) as store,
        pytest.raises(StartError, match=r"promotion.tasks: .*none.jsonl"),
    ):
        check_startup(settings, store)


# The process


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[ProxyWithEngine]:
    Store.open(f"sqlite:///{tmp_path}/store.db").close()
    server = EngineServer()
    with (
        serving(server, lifespan="off") as server.url,
        proxy_with_engine(server, MockEngine(), tmp_path / "store.db") as found,
    ):
        yield found
        found.close_clients()


def serve(store: Store, version: int) -> None:
    """It is served, and on disk."""
    detail = {"weights_step": version, "gate": "held_out"}
    store.record_version(PolicyVersion(version, version or None, "serving", detail=detail))
    kept = {"bytes": 1, "weights_step": version}
    store.note_version(PolicyVersion(version, version or None, "kept", detail=kept))


def evaluated(store: Store) -> list[RolloutSummary]:
    return [row for row in store.rollouts(limit=None) if VERSION_TAG in row.tags]


def test_the_worker_makes_held_out_rollouts_of_a_candidate_until_it_is_evaluated(
    proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    store = proxy.store
    serve(store, 0)
    seq = store.decide(Decision(kind="promote", version=0, by="me", reason="first"))
    store.close_decision(seq, {"version": 0})
    serve(store, 1)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"id": f"t{n}", "prompt": "hi"}) + "\n" for n in range(2)))
    resolved = {
        "state_dir": str(tmp_path),
        "proxy": {"store": f"sqlite:///{tmp_path}/store.db"},
        "promotion": {
            "gate": "held_out",
            "tasks": str(tasks),
            "command": [sys.executable, "-c", ASK],
        },
        "data": {},
        "rewards": {},
    }
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(resolved))
    env = {**os.environ, "TRACEGRAD_URL": proxy.url, "TRACEGRAD_API_KEY": ""}
    command = [sys.executable, "-m", "tracegrad_trainer.promotion.evaluator", str(file)]
    with (tmp_path / "log").open("ab") as log:
        worker = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        eventually(lambda: len(evaluated(store)) >= 4, WITHIN_S)  # a second pass has begun
        assert is_at_work(tmp_path, "evaluator", worker.pid)
        store.note_version(PolicyVersion(1, 1, "evaluated", detail={}))
        eventually(lambda: (read_state(tmp_path, "evaluator") or {})["version"] is None, WITHIN_S)
        eventually(lambda: all(row.outcome for row in evaluated(store)), WITHIN_S)
        found = evaluated(store)
        assert {row.tags[VERSION_TAG] for row in found} == {"1"}
        assert all(row.held_out for row in found)
        assert {row.task_id for row in found} == {"t0", "t1"}
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(WITHIN_S) == 0
    finally:
        worker.kill()
        worker.wait()
