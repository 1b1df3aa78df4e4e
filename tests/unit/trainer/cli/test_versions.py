"""`trainer versions` and the commands that decide about them: output, and one line of refusal."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tracegrad.store import Decision, PolicyVersion, StepRecord, Store
from tracegrad.store.ledger.ledger import Ledger
from tracegrad_trainer.cli.app import app

WHY = ["--why", "replies are empty"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(f"sqlite:///{tmp_path}/store.db")


def serve(store: Store, version: int, *, kept: bool = True) -> None:
    if version:
        made = StepRecord(step=version, version=version)
        Ledger(store).commit_step(made, trained=[], skipped={}, rollouts=[])
    detail: dict[str, Any] = {"weights_step": version}
    store.record_version(PolicyVersion(version, version or None, "serving", detail=detail))
    state: Any = "kept" if kept else "not_kept"
    detail |= {"bytes": 4_000_000} if kept else {"reason": "beyond_keep"}
    store.note_version(PolicyVersion(version, version or None, state, detail=detail))


def run(tmp_path: Path, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, f"--state-dir={tmp_path}"], env={"COLUMNS": "200"})


def one_line(result: Result) -> str:
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    [line] = result.stderr.strip().splitlines()
    return line


def test_versions_are_listed_with_who_decided_and_why(store: Store, tmp_path: Path) -> None:
    assert run(tmp_path, "versions").stdout.strip() == "no version yet: nothing was pushed"
    serve(store, 0, kept=False)
    serve(store, 1)
    serve(store, 2)
    for kind, version in (("promote", 1), ("pin", 1), ("pause", None)):
        seq = store.decide(
            Decision(kind=kind, version=version, by="ann@host", reason="tested")  # type: ignore[arg-type]
        )
        store.close_decision(seq, {} if version is None else {"version": version})
    shown = run(tmp_path, "versions").stdout
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "model" in lines["0"]
    assert "no (beyond_keep)" in lines["0"]
    assert "promoted" in lines["1"]
    assert "4 MB, pinned" in lines["1"]
    assert "pin by ann@host: tested" in lines["1"]
    assert lines["2"].split()[1] == "*", "it is served"
    assert "training is paused by ann@host: tested" in shown
    found = json.loads(run(tmp_path, "versions", "--json").stdout)
    assert (found["serving"], found["promoted"]) == (2, 1)
    assert found["paused"]["by"] == "ann@host"
    first, second, third = found["versions"]
    assert (first["kept"], first["not_kept"]) == (False, "beyond_keep")
    assert (second["state"], second["pinned"]) == ("promoted", True)
    assert (third["state"], third["serving"], third["step"]) == ("served", True, 2)


def test_decisions_are_listed_with_what_came_of_them(store: Store, tmp_path: Path) -> None:
    assert run(tmp_path, "versions", "--decisions").stdout.strip() == "no decision yet"
    serve(store, 0)
    serve(store, 1)
    made: dict[str, Any] = {"by": "guard:questions", "reason": "80% ask"}
    pause = store.decide(Decision(kind="pause", **made))
    store.close_decision(pause, {})
    back = store.decide(Decision(kind="rollback", version=7, training="pause", **made))
    store.close_decision(back, {"refused": "version: 7 is not kept"})
    store.decide(Decision(kind="pin", version=1, by="ann@host", reason="for later"))
    first, second, third = run(tmp_path, "versions", "--decisions").stdout.splitlines()[-3:]
    assert "guard:questions" in first
    assert "training is paused; calls are served" in first
    assert "rollback 7" in second
    assert "refused: version: 7 is not kept" in second
    assert "pin is recorded, and no trainer has acted on it yet" in third
    found = json.loads(run(tmp_path, "versions", "--decisions", "--last=1", "--json").stdout)
    assert [(one["kind"], one["version"]) for one in found] == [("pin", 1)]
    shown = run(tmp_path, "versions").stdout
    assert "rollback by guard:questions: 80% ask: version: 7 is not kept (--decisions)" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollback", "9"], "version: there is no version 9; the newest is 3"),
        (["rollback", "0"], "version: 0 is not kept on disk (beyond_keep); kept are: 1, 3"),
        (["rollback", "2"], "version: 2 was never served (failed)"),
        (["rollback", "1", "--training", "stop"], "training: 'stop'; a rollback has continue or"),
        (["promote", "9"], "version: there is no version 9; the newest is 3"),
        (["pin", "0"], "version: 0 is not kept on disk (beyond_keep); kept are: 1, 3"),
        (["unpin", "1"], "version: 1 is not pinned"),
        (["unpin", "7"], "version: there is no version 7; the newest is 3"),
        (["resume"], "training is not paused"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_recorded(
    store: Store, tmp_path: Path, words: list[str], said: str
) -> None:
    serve(store, 0, kept=False)
    serve(store, 1)
    store.record_version(PolicyVersion(2, 2, "failed"))
    serve(store, 3)
    line = one_line(run(tmp_path, *words, *WHY))
    assert line.startswith(f"trainer {words[0]}: {said}")
    assert store.decisions() == []


def test_a_rollback_with_nothing_to_go_back_to_says_so(store: Store, tmp_path: Path) -> None:
    line = one_line(run(tmp_path, "rollback", *WHY))
    assert line == (
        "trainer rollback: version: nothing is served yet, so there is nothing to go back from"
    )
    serve(store, 0)
    line = one_line(run(tmp_path, "rollback", *WHY))
    assert "no good version before 0 is kept on disk, and none was promoted" in line


def test_a_store_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert one_line(run(tmp_path / "nowhere", "versions")).startswith("trainer versions: no store")
    assert one_line(run(tmp_path / "nowhere", "pause", *WHY)).startswith("trainer pause: no store")


def test_a_reason_is_asked_for(store: Store, tmp_path: Path) -> None:
    assert run(tmp_path, "pause").exit_code == 2
    assert "reason: is empty" in one_line(run(tmp_path, "pause", "--why", " "))


def test_without_a_trainer_it_is_recorded(store: Store, tmp_path: Path) -> None:
    done = run(tmp_path, "pause", *WHY, "--wait", "0")
    assert done.exit_code == 0
    assert "is recorded, and no trainer has acted on it yet" in done.stdout
    [decision] = store.decisions()
    assert (decision.kind, decision.reason) == ("pause", "replies are empty")
    assert "@" in decision.by


def test_a_pause_that_nobody_has_acted_on_yet_can_be_taken_back(
    store: Store, tmp_path: Path
) -> None:
    store.decide(Decision(kind="pause", by="guard:questions", reason="80% ask"))
    done = run(tmp_path, "resume", *WHY, "--wait", "0")
    assert done.exit_code == 0, done.stderr
    assert [one.kind for one in store.open_decisions()] == ["pause", "resume"]


def answer(store: Store, outcome: dict[str, Any]) -> threading.Thread:
    """Rank 0, in a thread."""

    def act() -> None:
        while not (found := store.open_decisions()):
            time.sleep(0.01)
        assert found[0].seq is not None
        store.close_decision(found[0].seq, outcome)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_what_rank_zero_did_is_said(store: Store, tmp_path: Path) -> None:
    serve(store, 0)
    serve(store, 1)
    thread = answer(store, {"version": 0, "served": True, "newest": 1, "last_step": 1})
    done = run(tmp_path, "rollback", *WHY, "--training", "pause", "--wait", "60")
    thread.join()
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("version 0 is served again (")
    assert done.stdout.strip().endswith("; training is paused")


def test_what_rank_zero_refuses_is_one_line(store: Store, tmp_path: Path) -> None:
    serve(store, 0)
    serve(store, 1)
    thread = answer(store, {"refused": "version-00000000 is damaged"})
    line = one_line(run(tmp_path, "rollback", "0", *WHY, "--wait", "60"))
    thread.join()
    assert line == "trainer rollback: version-00000000 is damaged"
