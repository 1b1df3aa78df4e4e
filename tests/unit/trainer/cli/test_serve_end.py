"""How `trainer serve` says that it has nothing to do, what is not selected, and why it ended."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from support.trainer.step_samples import trainer_settings
from tracegrad.store import Ledger, StepRecord, Store
from tracegrad_trainer.cli import serve as serving
from tracegrad_trainer.cli.serve import ServeStack, serve
from tracegrad_trainer.config.gpus import GpuSettings
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.run_journal import RunRecord, read_runs
from tracegrad_trainer.launch.run_state import RunState
from tracegrad_trainer.launch.session import NOTHING, StopRequested
from tracegrad_trainer.utils.network import find_free_port
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    """Of a run whose seventh step is committed, and may be the last."""
    made = trainer_settings(tmp_path, max_steps=7, proxy={"port": find_free_port()})
    with Store.open(made.proxy.store) as store:
        commit(store, 7)
    return made


def commit(store: Store, step: int) -> None:
    record = StepRecord(step=step, version=step + 1, checkpoint="c")
    Ledger(store).commit_step(record, trained=[], skipped={}, rollouts=[])


def served(settings: TrainerSettings) -> tuple[int, list[str], RunRecord]:
    """The exit code, the lines, and what the journal says of it."""
    file = io.StringIO()
    code = serve(settings, Console(file=file, width=100))
    [run] = read_runs(settings.state_dir).runs
    return code, file.getvalue().splitlines(), run


def test_a_run_that_has_reached_max_steps_says_so_and_starts_nothing(
    settings: TrainerSettings,
) -> None:
    code, [line], run = served(settings)
    assert code == NOTHING
    assert line == (
        "trainer serve: nothing to do: step 7 is the last one, and max_steps = 7 is reached; to go"
        " on, set it higher (--set max_steps=14)"
    )
    assert (run.ending, run.at_step, run.from_step, run.from_version) == ("max_steps", 7, 7, 8)
    assert not (settings.state_dir / "logs").exists(), "nothing was started"


class Ranks(ChildProcess):
    """Ranks that commit a step and end, or do something else. `said`: in their state."""

    said: ClassVar[dict[str, Any]] = {}

    def __init__(self, settings: TrainerSettings, program: str) -> None:
        command = [sys.executable, "-c", program]
        super().__init__("ranks", command, log=settings.logs / "ranks.log")
        self.settings = settings

    def start(self) -> None:
        with Store.open(self.settings.proxy.store) as store:
            commit(store, 8)
        RunState(self.settings.state_dir, "ranks").update(stage="waiting", **self.said)
        super().start()


def started(monkeypatch: pytest.MonkeyPatch, settings: TrainerSettings, then: Any) -> None:
    """A stack that comes up at once, with ranks alone; `then`: their program, or an error."""

    def start(stack: ServeStack) -> None:
        begin(stack)
        if isinstance(then, BaseException):
            raise then
        stack.children = [Ranks(settings, then)]
        stack.children[0].start()

    def begin(stack: ServeStack) -> None:
        stack.lock = serving.lock_state_folder(settings.state_dir)
        stack.state = RunState(settings.state_dir, "serve")
        stack.store = serving.open_store(settings.proxy.store)
        stack.journal = serving.RunJournal(settings.state_dir, "trainer serve", step=7, version=8)

    monkeypatch.setattr(ServeStack, "start", start)


@pytest.mark.parametrize(
    ("limit", "then", "code", "ending", "words"),
    [
        (
            8,
            "",
            0,
            "max_steps",
            "ended after step 8, version 9: max_steps = 8 is reached; to go on",
        ),
        (9, "", 0, "signal", "ended after step 8, version 9: the ranks were asked to end"),
        (9, StopRequested("Ctrl-C"), 0, "signal", "stopped by Ctrl-C; everything captured is in"),
        (9, ChildError("vllm was killed"), 1, "error", "trainer serve: vllm was killed"),
        (9, "raise SystemExit(7)", 1, "error", "trainer serve: ranks (pid "),
    ],
)
def test_each_end_is_said_and_kept(
    settings: TrainerSettings,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    then: Any,
    code: int,
    ending: str,
    words: str,
) -> None:
    settings = settings.model_copy(update={"max_steps": limit, "max_restarts": 0})
    settings.logs.mkdir(parents=True)
    started(monkeypatch, settings, then)
    ended, lines, run = served(settings)
    assert (ended, run.ending) == (code, ending)
    assert lines[-1].startswith(words)
    assert run.at_step == (7 if isinstance(then, BaseException) else 8)
    assert run.ended_at is not None


class Screen(io.StringIO):
    """Makes a file when all of some lines are on it."""

    def __init__(self, file: Path, *lines: str) -> None:
        super().__init__()
        self.file, self.lines = file, lines

    def write(self, text: str) -> int:
        written = super().write(text)
        if all(f"{line}\n" in self.getvalue() for line in self.lines):
            self.file.touch()
        return written


def test_a_pattern_that_fits_nothing_is_on_the_screen_and_so_is_what_it_keeps_waiting(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings.logs.mkdir(parents=True)
    name = "batches.agents = 'writter'"
    line, back = f"{name} fits no turn; there are: 'writer'", "2 rollouts are given back: …"
    monkeypatch.setattr(Ranks, "said", {"unmatched": {name: line}, "given_back": back})
    seen = tmp_path / "seen"
    until_it_is_seen = (
        "import pathlib, time\n"
        "end = time.monotonic() + 60\n"
        f"while not pathlib.Path({str(seen)!r}).exists() and time.monotonic() < end:\n"
        "    time.sleep(0.05)"
    )
    started(monkeypatch, settings, until_it_is_seen)
    screen = Screen(seen, line, f"waiting: {back}")
    assert serve(settings.model_copy(update={"max_steps": 9}), Console(file=screen)) == 0
    assert seen.exists(), screen.getvalue()
    assert screen.getvalue().count(line) == 1


@pytest.mark.parametrize("share", [True, False])
def test_vllm_is_not_started_again_in_the_memory_of_ranks_that_train(
    settings: TrainerSettings, share: bool
) -> None:
    made = settings.with_changes(gpus=GpuSettings(share=share))
    stack = ServeStack(made, Console(quiet=True))
    stack.children = [ChildProcess(name, ["unused"], log=made.logs) for name in ("vllm", "ranks")]
    vllm, ranks = stack._supervisor().parts
    assert vllm.awaits() is None, "no ranks yet"
    state = RunState(made.state_dir, "ranks")
    state.update(stage="training")
    assert vllm.awaits() == ("when the ranks have trained" if share else None)
    assert ranks.awaits() is None
    state.update(stage="waiting for vLLM")
    assert vllm.awaits() is None
    state.update(stage="training", pid=2**22 + 1)
    assert vllm.awaits() is None, "killed while they trained"
