"""`trainer status`: from a store and the files of a run; of a long one, right figures, and no more
of the store read than they need."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sqlalchemy import event, update

from support.proxy.servers import eventually
from support.store.intake_requests import intake_request
from support.trainer.step_samples import rollout
from tracegrad.events import Event, RolloutStarted
from tracegrad.inspect import step_columns
from tracegrad.store import Ledger, PolicyVersion, StepRecord, Store
from tracegrad.store.ledger.intake import Intake
from tracegrad.store.maintenance import RetentionRule, RolloutSelection, prune
from tracegrad.store.models import IntakeRequests
from tracegrad_trainer.cli import render_status
from tracegrad_trainer.cli.render_status import format_step_line
from tracegrad_trainer.cli.status import RECENT_STEPS, RunStatus, collect_status
from tracegrad_trainer.launch.run_journal import Ending, RunJournal
from tracegrad_trainer.launch.run_state import RunState, delete_state, read_state
from tracegrad_trainer.launch.session import StepFeed
from tracegrad_trainer.launch.torchrun import RankProcesses
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess

METRICS: dict[str, Any] = {
    "seconds": {"train": 1.0, "wait": 3.0},
    "reward_mean": 0.5,
    "group_spread": 0.25,
    "turns_trained": 6.0,
    "loss": -0.125,
    "grad_norm": 1.5,
    "entropy": 2.0,
    "k3": 1e-3,
    "ess": 0.75,
    "clipped_turn_share": 0.5,
    "staleness_mean": 1.5,
    "gap_max": 1e-6,
    "gap_mean": 1e-7,
    "tokens_per_second": 12345.0,
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path}/store.db") as opened:
        yield opened


def tagged(name: str, split: str, **more: Any) -> list[Event]:
    events = rollout(name, name, **more)
    opened = RolloutStarted(rollout_id=name, task_id=name, tags={"split": split}, opened_at=1000.0)
    return [opened, *events[1:]]


def commit(store: Store, step: int, **more: Any) -> None:
    record = StepRecord(step=step, version=step, metrics=METRICS, checkpoint="c", batch={"x": 1})
    Ledger(store).commit_step(record, **({"trained": [], "skipped": {}, "rollouts": []} | more))


def printed(found: RunStatus, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(render_status.render_status(found))
    return file.getvalue()


def test_a_long_run_is_counted_whole_and_read_in_part(store: Store, tmp_path: Path) -> None:
    steps = RECENT_STEPS + 20
    for step in range(1, steps + 1):
        commit(store, step)
    store.append(rollout("r", "r", reward=1.0, seed=1))
    said: list[str] = []

    def listen(*arguments: Any) -> None:
        said.append(str(arguments[2]).lower())

    event.listen(store._engine, "before_cursor_execute", listen)
    found = collect_status(store, tmp_path)
    assert (found.steps_total, len(found.steps), found.steps[0]["step"]) == (steps, 10, steps)
    assert found.seconds == {"train": float(RECENT_STEPS), "wait": 3.0 * RECENT_STEPS}
    assert found.seconds_steps == RECENT_STEPS
    assert all(step["batch"] is None and not step["settings"] for step in found.steps)
    of_steps = [sql for sql in said if "from steps" in sql and "count(*)" not in sql]
    curves = [sql for sql in said if "rollouts.finished_at, " in sql]
    assert of_steps
    assert curves
    assert all("limit" in sql for sql in of_steps + curves)
    assert not any("steps.batch" in sql or "steps.settings" in sql for sql in of_steps)


def test_success_is_that_of_each_split(store: Store, tmp_path: Path) -> None:
    for n in range(4):
        store.append(tagged(f"a{n}", "train", reward=float(n % 2), seed=n))
        store.append(tagged(f"b{n}", "held_out", reward=1.0, seed=n))
    found = collect_status(store, tmp_path)
    assert found.success["train"] == {
        "mean": 0.5,
        "error": pytest.approx((1 / 3) ** 0.5 / 2),
        "rollouts": 4,
    }
    assert found.success["held_out"] == {"mean": 1.0, "error": 0.0, "rollouts": 4}
    assert "all" not in found.success


def test_removed_turns_are_counted_apart_from_those_that_are_there(
    store: Store, tmp_path: Path
) -> None:
    for n in range(3):
        store.append(rollout(f"r{n}", "t", reward=1.0, seed=n, at=1000.0 + 100 * n))
    assert collect_status(store, tmp_path).removed == {}
    trained = [f"r0.{i}" for i in range(2)]
    commit(store, 1, trained=trained, skipped={"r0.2": "greedy"}, rollouts=["r0"])
    prune(store, RetentionRule(selection=RolloutSelection(before=1050.0)))
    found = collect_status(store, tmp_path)
    assert found.removed == {"rollouts": 1, "turns": 3, "trained": 2}
    assert (found.turns_captured, found.turns_trained) == (6, 0)
    assert "turns removed" in printed(found, 80)


def test_the_last_push_that_serves_is_shown(store: Store, tmp_path: Path) -> None:
    gap = {"tokens": 64, "mean": 1e-6, "max": 4e-6, "allowed": "float32"}
    took = {"seconds": {"load": 0.5, "verify": 0.25}, "paused_s": 0.5, "held_s": 0.625}
    store.record_version(PolicyVersion(1, 1, "serving", detail={"gap": gap, **took}))
    store.record_version(PolicyVersion(2, 2, "failed", detail={"gap": None, "error": "x"}))
    found = collect_status(store, tmp_path)
    assert (found.version, found.failed_versions) == (1, [2])
    whole = {"version": 1, "seconds": 0.75, "paused_s": 0.5, "held_s": 0.625, "gap": gap}
    assert found.push == whole
    assert "0.75 s, of it 0.50 s without a token" in printed(found, 120)
    assert "1.0e-06 on average, 4.0e-06 at most" in printed(found, 120)


@pytest.mark.parametrize("width", [80, 120])
def test_its_tables_fit_a_terminal(store: Store, tmp_path: Path, width: int) -> None:
    commit(store, 1)
    text = printed(collect_status(store, tmp_path), width)
    [head, line] = [each.split() for each in text.splitlines() if " ess" in each or "12k" in each]
    shown = dict(zip(head, line, strict=False))
    assert (shown["ess"], shown["clip"], shown["ent."], shown["grad"]) == (
        "0.75",
        "50%",
        "2.00",
        "1.5",
    )
    assert "12k" in line
    assert max(map(len, text.splitlines())) <= width


def test_the_newest_steps_come_first(store: Store, tmp_path: Path) -> None:
    for number in range(1, 13):
        commit(store, number)
        store.record_version(PolicyVersion(number, number, "serving"))
    found = collect_status(store, tmp_path)
    assert [step["step"] for step in found.steps] == list(range(12, 2, -1))
    assert found.steps_total == found.version == 12
    assert found.seconds == {"train": 12.0, "wait": 36.0}
    assert found.stage == "stopped"


def test_each_step_is_new_once_however_many_come_between(store: Store) -> None:
    commit(store, 1)
    feed = StepFeed(store)
    assert feed.new_steps() == []
    for number in range(2, 53):
        commit(store, number)
    assert [step.step for step in feed.new_steps()] == [*range(2, 53)]
    assert feed.new_steps() == []


def test_ranks_that_end_well_while_steps_are_shown_are_no_fault(
    store: Store, tmp_path: Path
) -> None:
    """Their end falls between two looks at it; the step that they made last is shown."""
    fifo = tmp_path / "end"
    os.mkfifo(fifo)
    command = [sys.executable, "-c", f"open({str(fifo)!r}).read()"]
    ranks = ChildProcess("ranks", command, log=tmp_path / "ranks.log")
    feed, shown = StepFeed(store), list[int]()
    commit(store, 1)

    def show(step: StepRecord) -> None:
        shown.append(step.step)
        if step.step == 1:
            commit(store, 2)
            fifo.open("w").close()
            eventually(lambda: ranks.exit_code() == 0, seconds=60)

    ranks.start()
    try:
        feed.show_until_end(ranks, show, ranks.check)
    finally:
        ranks.stop()
    assert shown == [1, 2]


def test_a_mismatch_after_a_push_is_loud() -> None:
    metrics = {"gap_max": 9.1, "gap_mean": 4.6, "mismatch": 1.0}
    step = StepRecord(step=7, version=8, metrics=metrics)
    assert "gap 4.6e+00 TOO LARGE: serving and training engine disagree" in format_step_line(step)
    quiet = StepRecord(step=7, version=8, metrics={"gap_max": 3e-6, "mismatch": 0.0})
    assert "TOO LARGE" not in format_step_line(quiet)


def test_a_process_that_is_gone_does_not_run(store: Store, tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    state = RunState(tmp_path, "serve")
    state.update(pid=gone.pid, stage="serving")
    assert collect_status(store, tmp_path).stage == "stopped"
    state.update(pid=os.getpid())
    assert collect_status(store, tmp_path).stage == "serving"
    delete_state(tmp_path, "serve")
    assert read_state(tmp_path, "serve") is None


def test_steps_that_wait_for_a_checkpoint_are_shown(store: Store, tmp_path: Path) -> None:
    ranks = RunState(tmp_path, "ranks")
    ranks.update(stage="training", pending=[4, 5, 6])
    lost = "steps 4 to 6: lost with the run; the next one trains their turns again"
    assert lost in printed(collect_status(store, tmp_path), 200), "they died with their trainer"
    RunState(tmp_path, "serve").update(stage="serving")
    found = collect_status(store, tmp_path)
    assert found.pending_steps == [4, 5, 6]
    assert "steps 4 to 6: made, and waiting for a checkpoint" in printed(found, 200)
    ranks.update(pending=[7])
    assert "step 7: made" in printed(collect_status(store, tmp_path), 200)
    commit(store, 7)
    assert "not committed" not in printed(collect_status(store, tmp_path), 200)
    ranks.update(pending=[])
    assert "not committed" not in printed(collect_status(store, tmp_path), 200)


def test_lines_of_the_journal_that_cannot_be_read_are_counted(store: Store, tmp_path: Path) -> None:
    RunJournal(tmp_path, "trainer serve", step=3, version=3).end("done", "", step=3)
    assert "damaged" not in printed(collect_status(store, tmp_path), 200)
    with (tmp_path / "run" / "journal.jsonl").open("a") as journal:
        journal.write('{"run": "x", "comm\n[1]\n')
    found = collect_status(store, tmp_path)
    assert found.as_json()["damaged_records"] == 2
    shown = " ".join(printed(found, 200).split())
    assert "damaged 2 lines of run/journal.jsonl: passed over" in shown


@pytest.mark.parametrize(
    ("ending", "detail", "step", "words"),
    [
        ("signal", "stopped by Ctrl-C", 7, " ago at step 7: stopped by Ctrl-C"),
        ("max_steps", "max_steps = 7 is reached", 7, " ago at step 7: max_steps = 7 is"),
        ("error", "vllm (pid 7) was killed", None, " ago: vllm (pid 7) was killed"),
    ],
)
def test_why_the_last_run_ended_is_kept(
    store: Store, tmp_path: Path, ending: Ending, detail: str, step: int | None, words: str
) -> None:
    RunJournal(tmp_path, "trainer serve", step=3, version=3).end(ending, detail, step=step)
    found = collect_status(store, tmp_path)
    assert found.last_run is not None
    assert (found.stage, found.last_run["ending"], found.last_seen) == ("stopped", ending, None)
    assert words in printed(found, 200).splitlines()[0]


def test_a_run_that_was_killed_ended_without_a_word(store: Store, tmp_path: Path) -> None:
    begin = "RunJournal(p, 'trainer serve', step=3, version=3); RunState(p, 'serve').update(stage="
    program = (
        "import os, sys; from pathlib import Path;"
        "from tracegrad_trainer.launch.run_journal import RunJournal;"
        "from tracegrad_trainer.launch.run_state import RunState; p = Path(sys.argv[1]);"
        f"{begin}'serving'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    found = collect_status(store, tmp_path)
    assert found.stage == "stopped"
    assert found.last_seen is not None
    line = printed(found, 200).splitlines()[0]
    assert "not running; trainer serve ended without a word (killed by SIGKILL" in line
    assert "last seen" in line


def test_what_runs_says_where_it_began_and_what_it_waits_for(store: Store, tmp_path: Path) -> None:
    resolved = {
        "batches": {"groups": 2, "group_size": 4},
        "data": {"tags": {}, "incomplete_after_s": 120.0, "refill": None},
        "objective": {"preset": "grpo"},
    }
    store.append(rollout("r", "r", reward=1.0, seed=1, at=time.time() - 3 * 3600))
    waits = "1 task has 1 of 4 attempts; 0 of 2 groups ready; newest 3 h ago"
    stopped = collect_status(store, tmp_path, resolved=resolved)
    assert stopped.waiting_for == waits
    assert f"next batch      {waits}" in printed(stopped, 120)
    RunState(tmp_path, "serve").update(
        stage="serving", url="http://127.0.0.1:4141", placement="placement: vLLM on GPU 0"
    )
    ranks = RunState(tmp_path, "ranks")
    ranks.update(stage="waiting", begins="resumes from step 39, version 39")
    found = collect_status(store, tmp_path, resolved=resolved)
    text = printed(found, 120)
    assert re.match(r"serving at http://127.0.0.1:4141  \(for \d+ s; waiting for \d+ s\)", text)
    assert "this run        resumes from step 39, version 39" in text
    assert "placement       vLLM on GPU 0" in text
    assert f"waiting         {waits}" in text
    evaluator = RunState(tmp_path, "evaluator")
    evaluator.update(stage="evaluating", version=7, passes=4, failed=1, error="exit code 3")
    text = printed(collect_status(store, tmp_path, resolved=resolved), 120)
    assert "run against version 7; 4 runs of the tasks; 1 failed: exit code 3" in text
    name, back = "batches.agents = 'writter'", "2 rollouts are given back: nothing fits"
    ranks.update(unmatched={name: f"{name} fits no turn; there are: 'writer'"}, given_back=back)
    found = collect_status(store, tmp_path, resolved=resolved)
    assert (found.waiting_for, found.as_json()["unmatched"]) == (
        back,
        ["batches.agents = 'writter' fits no turn; there are: 'writer'"],
    )
    assert re.search(r"selection +batches.agents = 'writter' fits no turn", printed(found, 120))
    ranks.update(given_back=None)
    ranks.update(stage="training")
    assert collect_status(store, tmp_path, resolved=resolved).waiting_for is None
    assert collect_status(store, tmp_path, resolved={"batches": {}}).waiting_for is None


def test_a_trainer_step_that_runs_is_no_standstill(store: Store, tmp_path: Path) -> None:
    RunJournal(tmp_path, "trainer step", step=3, version=3)
    RunState(tmp_path, "ranks").update(stage="training")
    found = collect_status(store, tmp_path)
    assert (found.stage, found.doing) == ("stepping", "training")
    assert "training for" in printed(found, 120).splitlines()[0]


def test_a_serve_that_has_just_begun_is_starting(store: Store, tmp_path: Path) -> None:
    RunJournal(tmp_path, "trainer serve", step=3, version=3)
    assert collect_status(store, tmp_path).stage == "starting"


def test_news_that_cannot_be_written_stop_nobody(tmp_path: Path) -> None:
    state = RunState(tmp_path / "state", "serve")
    state.update(stage="serving")
    (tmp_path / "state" / "run").rename(tmp_path / "elsewhere")
    state.update(stage="stopping")  # as on a disk that is full
    assert read_state(tmp_path / "state", "serve") is None


LAUNCHER_SAYS = """\
RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 4243)
  error_file: <N/A>
============================================================
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-signal.SIGKILL, r"^rank 1 \(pid 4243\) was killed by SIGKILL \(log: .*ranks\.log\)$"),
        (1, r"^ranks \(pid \d+\) exited with 1: RuntimeError: .*Connection closed"),
    ],
)
def test_the_rank_that_was_killed_is_named(tmp_path: Path, code: int, words: str) -> None:
    ranks = RankProcesses.__new__(RankProcesses)  # as it is, but for what it runs
    said = LAUNCHER_SAYS.format(code=code)
    command = [sys.executable, "-c", f"print({said!r}); raise SystemExit(1)"]
    ChildProcess.__init__(ranks, "ranks", command, log=tmp_path / "ranks.log")
    ranks.start()
    ranks._process.wait()  # type: ignore[union-attr]
    with pytest.raises(ChildError, match=words):
        ranks.check()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_headings_of_steps_have_a_legend_that_the_docs_have_too(
    store: Store, tmp_path: Path, width: int
) -> None:
    commit(store, 1)
    text = printed(collect_status(store, tmp_path), width)
    page = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    explained = [one for one in step_columns._COLUMNS if one.meaning is not None]
    assert {heading for heading, *_ in explained} >= {"spread", "ent.", "k3", "ess", "clip", "gap"}
    for heading, metric, _, meaning in explained:
        assert f"{heading} {meaning}" in [" ".join(line.split()) for line in text.splitlines()]
        assert f"| `{heading}` | `{metric}` | {meaning} |\n" in page


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("as_json", [True, False])
def test_it_is_watched_until_ctrl_c(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
    as_json: bool,
) -> None:
    steps = iter([1, 2])

    def pause(seconds: float) -> None:
        if (step := next(steps, None)) is None:
            raise KeyboardInterrupt
        commit(store, step)

    monkeypatch.setattr("tracegrad_trainer.cli.render_status.sleep", pause)
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=120)
    render_status.watch_status(
        lambda: collect_status(store, tmp_path), console, as_json=as_json, every_s=1
    )
    if as_json:
        lines = capsys.readouterr().out.splitlines()
        assert [json.loads(line)["steps_total"] for line in lines] == [0, 1, 2]
    else:
        text = shown.getvalue()
        found = re.findall(r"in (\d) steps?\b", text)
        assert found == ["0", "1", "2"]
        assert ("\x1b[?1049h" in text, "\x1b[?1049l" in text) == (terminal, terminal)


def test_the_lag_of_tokens_is_that_of_all_steps(store: Store, tmp_path: Path) -> None:
    for step, (tokens, shares) in enumerate([(100.0, (1.0, 0.0)), (300.0, (0.5, 0.5))], start=1):
        lags = {f"lag_share_{lag}": share for lag, share in enumerate(shares)}
        metrics = METRICS | {"sampled_tokens": tokens} | lags
        record = StepRecord(step=step, version=step, metrics=metrics, checkpoint="c")
        Ledger(store).commit_step(record, trained=[], skipped={}, rollouts=[])
    store.append(rollout("r", "t", reward=1.0, seed=0))
    turns = [turn.turn_id for turn in store.rollout_turns("r")]
    Ledger(store).commit_skipped(dict.fromkeys(turns, "stale"), ["r"])
    found = collect_status(store, tmp_path)
    assert found.lags == {"0": 0.625, "1": 0.375}
    assert found.dropped == {"stale": 1.0, "over_sampled": 0.0}
    assert "0: 62%, 1: 38%; of all turns 100% were" in printed(found, 200)


def test_who_drives_is_told_whether_and_why_to_wait(store: Store, tmp_path: Path) -> None:
    assert collect_status(store, tmp_path).intake is None
    intake = Intake(store)
    intake.request(intake_request())
    assert "wait for nobody: no setting bounds what they open" in printed(
        collect_status(store, tmp_path), 200
    )
    intake.request(intake_request(in_flight=4))
    assert "may open 4 rollouts now" in printed(collect_status(store, tmp_path), 200)
    intake.ask(4)
    assert "wait: data.in_flight = 4: 4 open" in printed(collect_status(store, tmp_path), 200)


def test_a_trainer_that_gives_no_sign_holds_nobody_back(store: Store, tmp_path: Path) -> None:
    Intake(store).request(intake_request(in_flight=4))
    with store.exclusive() as connection:
        connection.execute(update(IntakeRequests).values(updated_at=time.time() - 120))
    said = printed(collect_status(store, tmp_path), 200)
    assert "wait for nobody: the trainer's last sign came 2 min ago" in said
