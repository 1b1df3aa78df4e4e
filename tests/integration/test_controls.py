"""The honest controls in their short form: real processes, the demo's own agent and model. Beside
the first of them runs the soak's short form: people chat in every dialect while it is trained."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from bench.soak.dialects import DIALECTS
from bench.soak.run import background, complaints, turns_of
from bench.soak.sampler import Sample, Sampler, samples_in
from bench.soak.traffic import Call, calls_in

from tracegrad.store import Ledger, Store
from tracegrad_trainer.launch.run_state import read_state

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
DEMOS = ROOT / ".tracegrad" / "demo"
# Of the ten steps that the first one makes. Then come its last steps and an exam: the traffic has
# ended long before its servers do.
STEPS = 7
PROXY_MIB = 200.0  # caches and buffers fill in the first minute


@dataclass(frozen=True)
class Beside:
    """What the traffic beside the first demo left."""

    state_dir: Path
    calls: Sequence[Call]
    samples: Sequence[Sample]
    left: Sequence[str]
    steps: int  # that were made meanwhile


@dataclass(frozen=True)
class Controls:
    code: int
    output: str
    errors: str
    beside: Beside


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> Controls:
    folder = tmp_path_factory.mktemp("controls")
    output, errors = folder / "output", folder / "errors"
    command = [sys.executable, "-m", "examples.shop.controls", "--short"]
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err)
        try:
            state_dir = _first_demo(process)
            sampler, steps = _talk_beside(process, state_dir, folder)
            process.wait()
        finally:
            if process.poll() is None:
                for one in psutil.Process(process.pid).children(recursive=True):
                    one.kill()
                process.kill()
                process.wait()
    beside = Beside(
        state_dir,
        calls_in(folder / "calls"),
        samples_in(folder / "samples"),
        sampler.left(),
        steps,
    )
    return Controls(process.returncode, output.read_text(), errors.read_text(), beside)


def _first_demo(process: subprocess.Popen[bytes]) -> Path:
    """The folder of the demo that `process` runs, once it serves."""
    while process.poll() is None:
        for folder in DEMOS.glob("20*"):
            state = read_state(folder, "serve") or {}
            if state.get("stage") == "serving" and state["alive"]:
                above = psutil.Process(state["pid"]).parents()
                if process.pid in [one.pid for one in above]:
                    return folder
        time.sleep(0.2)
    raise AssertionError("the controls ended before a demo served")


def _talk_beside(
    process: subprocess.Popen[bytes], state_dir: Path, folder: Path
) -> tuple[Sampler, int]:
    state = read_state(state_dir, "serve") or {}
    url: str = state["url"]
    with (
        Store.open(state["store"], create=False) as store,
        Sampler(state["pid"], state_dir, url, folder / "samples") as sampler,
        background(url, folder / "calls", rate=1.0, seed=0),
    ):
        while process.poll() is None and (steps := _steps(store)) < STEPS:
            time.sleep(0.2)
    return sampler, steps


def _steps(store: Store) -> int:
    last = Ledger(store).last_step()
    return 0 if last is None else last.step


def test_a_seed_rises_and_a_control_does_not(controls: Controls) -> None:
    """Shuffled rewards must leave held-out success where it was."""
    assert controls.code == 0, controls.output + controls.errors
    assert controls.output.count(" yes") == 2, "a seed and a control were measured"


def test_people_chat_in_every_dialect_while_it_is_trained(controls: Controls) -> None:
    beside = controls.beside
    assert [call for call in beside.calls if call.error is not None] == []
    answered = Counter(call.dialect for call in beside.calls if call.answer_id is not None)
    assert answered.keys() == {dialect.name for dialect in DIALECTS}
    assert {call.kind for call in beside.calls} == {"whole", "stream", "hang_up", "malformed"}
    assert any(call.turn > 1 and call.tools for call in beside.calls)
    assert beside.steps == STEPS


def test_every_answer_of_theirs_is_a_turn_that_nobody_trains(controls: Controls) -> None:
    beside = controls.beside
    answers = [call.answer_id for call in beside.calls if call.answer_id is not None]
    with Store.open(f"sqlite:///{beside.state_dir}/store.db", create=False) as store:
        assert turns_of(store, answers).keys() == set(answers)
        counts = store.turn_counts()
        trained = store.turn_counts({"split": "train"})
    assert counts.trained == trained.trained > 0


def test_all_processes_were_looked_at_and_are_gone(controls: Controls) -> None:
    beside = controls.beside
    expected = {"trainer serve", "vLLM server", "vLLM engine", "rank launcher", "ranks"}
    expected |= {"proxy", "proxy writers"}
    for sample in beside.samples:
        assert sample.roles.keys() == expected
        assert sample.roles["ranks"].processes == 2
        assert all(usage.rss_mib > 0 and usage.fds > 0 for usage in sample.roles.values())
    first, last = beside.samples[0], beside.samples[-1]
    assert last.roles["proxy"].rss_mib - first.roles["proxy"].rss_mib < PROXY_MIB
    assert last.metrics["turns_committed_total"] > first.metrics["turns_committed_total"]
    assert last.metrics["turns_lost_total"] == 0
    assert beside.left == []
    assert complaints(beside.state_dir) == []
