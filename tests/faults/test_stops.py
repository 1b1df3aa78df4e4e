"""`trainer serve` interrupted and killed, whole and in part, over and over in one folder.

Whatever happens: one clear line, no process left behind, every acknowledged turn in the store,
and the next start goes on from the last committed step. Each test starts where the one before
it left the folder, and works alone too.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from support.agents.group_load import GroupLoad, missing_calls
from support.agents.toy_agents import ToyAgents
from support.trainer.trainer_serve import TrainerServe, trainer_serve
from tracegrad.store import Ledger, Store

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
GONE_S = 30.0  # what a killed `trainer serve` leaves goes by itself; in general within five


@dataclass
class Place:
    """One folder through all faults, and what agents were told is done in it."""

    model: Path
    state_dir: Path
    toys: list[ToyAgents] = field(default_factory=list)

    @property
    def store_url(self) -> str:
        return f"sqlite:///{self.state_dir}/store.db"

    def last_step(self) -> int:
        if not (self.state_dir / "store.db").exists():
            return 0
        with Store.open(self.store_url) as store:
            step = Ledger(store).last_step()
        return step.step if step else 0

    @contextmanager
    def started(self) -> Iterator[TrainerServe]:
        """The first part that ends is its end: what happens otherwise is `test_restarts`'s."""
        with trainer_serve(self.state_dir, {"model": self.model, "max_restarts": 0}) as run:
            yield run

    @contextmanager
    def at_work(self) -> Iterator[TrainerServe]:
        """Serving, with agents at work, one step further than it was."""
        before, began = self.last_step(), time.time()
        with self.started() as run:
            run.wait_serving()
            with Store.open(self.store_url) as store:
                resumed = max(store.versions(), key=lambda version: version.version)
            # A push that failed halfway left its version's number behind: it is not served again.
            assert resumed.created_at > began, "it serves anew what was trained last"
            assert resumed.state == "serving"
            # Groups that were ready may have made a further step by now.
            assert (resumed.step or 0) >= before
            with GroupLoad(run.url) as crowd:
                self.toys.append(crowd.toys)
                run.wait(lambda: run.last_step() > before)
                yield run

    def is_whole(self) -> None:
        """Nothing that was acknowledged is lost, by this fault or one before it."""
        assert sum(len(toys.seen) for toys in self.toys) > 0
        assert missing_calls(self.store_url, self.toys) == []


@pytest.fixture(scope="module")
def place(char_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(char_model, tmp_path_factory.mktemp("faults") / "state")


MOMENTS = [1.0, 5.0]
MORE_MOMENTS = [0.6, 2.0, 3.0, 8.0, 11.0, 14.0, 17.0]


@pytest.mark.parametrize(
    "seconds", [*MOMENTS, *(pytest.param(m, marks=pytest.mark.slow) for m in MORE_MOMENTS)]
)
def test_ctrl_c_while_it_starts(place: Place, seconds: float) -> None:
    with place.started() as run:
        time.sleep(seconds)
        run.signal(signal.SIGINT)
        ended = run.ended()
    ended.is_clean()
    # Before it listens to signals at all, Python is ended by it, and prints nothing.
    assert ended.code == 0 or (ended.code == -signal.SIGINT and ended.lines == [])
    if ended.code == 0:
        assert re.fullmatch(
            r"stopped by (Ctrl-C|SIGTERM); everything captured is in the store", ended.last_line
        )


@pytest.mark.parametrize(
    "stage",
    ["training", pytest.param("pushing", marks=pytest.mark.slow)],
)
def test_ctrl_c_during_a_step(place: Place, stage: str) -> None:
    with place.at_work() as run:
        run.wait(lambda: run.doing() == stage)
        run.signal(signal.SIGINT)
        run.signal(signal.SIGINT)  # the same wish, as `timeout` sends it: no second one
        ended = run.ended()
    ended.is_clean()
    assert ended.code == 0
    assert re.fullmatch(
        r"stopped by (Ctrl-C|SIGTERM); everything captured is in the store", ended.last_line
    )
    place.is_whole()
    with Store.open(place.store_url) as store:
        step = Ledger(store).last_step()
        assert step is not None
        assert store.current_version() == step.version, "the step was committed and served"


@pytest.mark.parametrize(
    "stage",
    [
        "pushing",
        *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("waiting", "training")),
    ],
)
def test_vllms_engine_is_killed(place: Place, stage: str) -> None:
    """What the kernel ends first when memory runs out; the server is left with its callers."""
    with place.at_work() as run:
        run.wait(lambda: run.doing() == stage)
        os.kill(run.engine_pid(), signal.SIGKILL)
        ended = run.ended()
    ended.is_clean()
    assert ended.code == 1
    assert ended.last_line.startswith("trainer serve: vllm (pid ")
    assert "its engine process was killed" in ended.last_line
    assert str(place.state_dir / "logs" / "vllm.log") in ended.last_line
    place.is_whole()


def launcher(run: TrainerServe) -> int:
    return psutil.Process(run.pid_of("ranks")).ppid()


@pytest.mark.parametrize(
    ("who", "pid", "log"),
    [
        # Its engine is above, the server alone `tests/integration/test_vllm_process.py`'s.
        pytest.param("vllm", lambda run: run.pid_of("vllm"), "vllm.log", marks=pytest.mark.slow),
        ("rank 0", lambda run: run.pid_of("ranks"), "ranks.log"),
        pytest.param("ranks", launcher, "ranks.log", marks=pytest.mark.slow),
        # `test_restarts` kills it, `test_store_proxy_kills` shows that it loses nothing.
        pytest.param("proxy", lambda run: run.pid_of("proxy"), "proxy.log", marks=pytest.mark.slow),
    ],
)
def test_a_part_is_killed(
    place: Place, who: str, pid: Callable[[TrainerServe], int], log: str
) -> None:
    with place.at_work() as run:
        os.kill(pid(run), signal.SIGKILL)
        ended = run.ended()
    ended.is_clean()
    assert ended.code == 1
    errors = [line for line in ended.lines if line.startswith("trainer serve: ")]
    assert errors == [ended.last_line]
    assert re.match(rf"trainer serve: {who} \(pid \d+\) was killed by SIGKILL", ended.last_line)
    assert str(place.state_dir / "logs" / log) in ended.last_line
    place.is_whole()


def test_trainer_serve_itself_is_killed(place: Place) -> None:
    with place.at_work() as run:
        run.process.kill()
        run.process.wait()
        assert run.family.gone(within_s=GONE_S) == []
    place.is_whole()
