"""Parts of `trainer serve` are killed, one after the other, while agents work: each is started
again, and the run goes on with what it had."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import psutil
import pytest

from support.agents.group_load import GroupLoad, missing_calls
from support.trainer.kill_runs import fates
from support.trainer.prepared_run import steps_of
from support.trainer.trainer_serve import TrainerServe, cli, trainer_serve
from tracegrad.store import Store
from tracegrad_trainer.launch.run_state import read_state

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def run(char_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerServe]:
    state_dir = tmp_path_factory.mktemp("restarts") / "state"
    with trainer_serve(state_dir, {"model": char_model, "max_restarts": 20}) as run:
        run.wait_serving()
        yield run


@pytest.fixture(scope="module")
def crowd(run: TrainerServe) -> Iterator[GroupLoad]:
    with GroupLoad(run.url, patient=True) as crowd:
        yield crowd


VICTIMS: dict[str, tuple[str, Callable[[TrainerServe], int]]] = {
    "vllm": ("vllm", lambda run: run.pid_of("vllm")),
    "its engine": ("vllm", lambda run: run.engine_pid()),
    "proxy": ("proxy", lambda run: run.pid_of("proxy")),
    "rank 0": ("ranks", lambda run: run.pid_of("ranks")),
}


TOKENS = 300  # of a stream: some seconds
STAGES = ("training", "pushing", "waiting")
CASES = [(victim, stage) for stage in STAGES for victim in VICTIMS]
SHORT = [("vllm", "training"), ("proxy", "training"), ("rank 0", "training")]


@pytest.mark.parametrize(
    ("victim", "stage"),
    [pytest.param(*case, marks=[] if case in SHORT else pytest.mark.slow) for case in CASES],
)
def test_a_part_that_is_killed_is_started_again(
    run: TrainerServe, crowd: GroupLoad, victim: str, stage: str
) -> None:
    name, pid_of = VICTIMS[victim]
    before = restarts(run, name)
    run.wait(lambda: run.doing() == stage)
    pid = pid_of(run)
    os.kill(pid, signal.SIGKILL)
    run.wait(lambda: restarts(run, name) > before)
    run.wait(lambda: parts(run)[name]["up"], 180)
    step = run.last_step()
    run.wait(lambda: run.last_step() > step and served_version(run) is not None)
    seen = len(crowd.toys.seen)
    run.wait(lambda: len(crowd.toys.seen) > seen + 4)
    assert run.process.poll() is None
    shown = cli("trainer", "status", f"--state-dir={run.state_dir}")
    assert re.search(rf"started again +{name}, \d+ times?, last", shown)


def test_a_stream_goes_on_with_the_vllm_that_is_started_again(
    run: TrainerServe, crowd: GroupLoad
) -> None:
    """Its client sees a pause, and all the tokens that it asked for. On a busy machine it may have
    been read to its end by the time of the kill: then another one is begun."""
    for _ in range(5):
        read_over_a_kill(run)
        if "a stream goes on behind" in (run.state_dir / "logs" / "proxy.log").read_text():
            return
    raise AssertionError("no stream was in its middle")


def read_over_a_kill(run: TrainerServe) -> None:
    before, engine = restarts(run, "vllm"), run.engine_pid()
    with openai.OpenAI(base_url=f"{run.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "go on"}],
            max_tokens=TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = [next(stream) for _ in range(4)]
        os.kill(engine, signal.SIGKILL)
        chunks += stream
    run.wait(lambda: restarts(run, "vllm") > before)
    run.wait(lambda: parts(run)["vllm"]["up"], 180)
    text = "".join(each.delta.content or "" for chunk in chunks for each in chunk.choices)
    with Store.open(run.store_url, create=False) as store:
        turn = store.find_turn(chunks[0].id.removeprefix("chatcmpl-"))
    assert turn is not None
    assert turn.response is not None
    assert (turn.finish_reason, turn.untrainable) == ("length", None)
    assert len(turn.completion_token_ids) == TOKENS
    assert sum(count for _, count in turn.policy_versions) == TOKENS
    assert turn.response["choices"][0]["message"]["content"] == text


def test_a_second_signal_stops_at_once_and_nothing_is_lost_or_trained_twice(
    run: TrainerServe, crowd: GroupLoad
) -> None:
    """After the kills above; alone, of a run without any."""
    step = run.last_step()
    run.wait(lambda: run.last_step() > step)
    crowd.__exit__(None, None, None)
    # Ranks that cannot obey: the first signal would wait half a minute for them.
    psutil.Process(run.pid_of("ranks")).suspend()
    run.signal(signal.SIGTERM)
    run.wait(lambda: stage_of(run) == "stopping")
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(run.process.pid).wait(1.0)
    run.signal(signal.SIGTERM)
    ended = run.ended()
    ended.is_clean()
    assert ended.code == 1
    assert ended.last_line == "stopped at once by SIGTERM; everything captured is in the store"
    assert missing_calls(run.store_url, [crowd.toys]) == []
    steps = steps_of(run.store_url)
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    trained = Counter(step for step, _ in fates(run.store_url).values() if step is not None)
    assert trained == {step.step: step.metrics["turns_trained"] for step in steps}


def parts(run: TrainerServe) -> dict[str, dict[str, object]]:
    return dict((read_state(run.state_dir, "serve") or {}).get("parts", {}))


def restarts(run: TrainerServe, name: str) -> int:
    return int(str(parts(run).get(name, {}).get("restarts", 0)))


def stage_of(run: TrainerServe) -> str:
    return str((read_state(run.state_dir, "serve") or {}).get("stage"))


def served_version(run: TrainerServe) -> int | None:
    with Store.open(run.store_url, create=False) as store:
        return store.current_version()
