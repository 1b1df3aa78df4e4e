"""vLLM asleep while the ranks work: the order of calls, every failure, and a trainer that ends."""

from __future__ import annotations

import inspect
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.elastic.multiprocessing.api import PContext

from support.proxy.servers import eventually
from support.system.log_lines import our_lines
from support.trainer.sleeping_engine import MODEL_FOLDER, Refused, SleepingEngine
from support.trainer.step_samples import trainer_settings
from tracegrad_trainer.config.gpus import GpuSettings
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.config.vllm import VllmSettings
from tracegrad_trainer.inference import publish, wake_guard
from tracegrad_trainer.inference.control_routes import (
    EngineLostError,
    Peer,
    PushError,
    ServedWeights,
    SleepLevel,
    VllmControl,
)
from tracegrad_trainer.inference.engine_sleep import EngineSleep, SleepSettings
from tracegrad_trainer.inference.proxy_control import ProxyControl
from tracegrad_trainer.inference.publish import WeightPublisher
from tracegrad_trainer.inference.wake_guard import (
    ATTEMPTS,
    PAUSE_S,
    GuardedEngine,
    WakePlan,
    bring_back,
    wake,
)
from tracegrad_trainer.inference.weight_directory import PREFIX
from tracegrad_trainer.inference.weight_push import WeightPusher
from tracegrad_trainer.launch.folder_lock import lock_for_ranks
from tracegrad_trainer.utils.network import find_free_port
from tracegrad_trainer.utils.scratch_folder import remove_left_behind

LOAD = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
GO_ON = ["/wake_up kv_cache", "/resume", "/api/push/release"]
PUSHED = ["/wake_up weights", *LOAD, "/api/push/version", *GO_ON]


@pytest.fixture(scope="module")
def server() -> Iterator[SleepingEngine]:
    engine = SleepingEngine()
    yield engine
    engine.close()


@pytest.fixture
def engine(server: SleepingEngine) -> SleepingEngine:
    server.reset()
    return server


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_file({"w": torch.tensor([MODEL_FOLDER])}, folder / "model.safetensors")
    return folder


class RememberedPlan:
    """In place of the process: what it would do now."""

    def __init__(self) -> None:
        self.plan: WakePlan | None = None

    def arm(self, plan: WakePlan) -> None:
        self.plan = plan

    def disarm(self) -> None:
        self.plan = None

    def close(self) -> None:
        assert self.plan is None, "a guard that is needed is closed"


def make_pusher(
    url: str, checkpoint: Path, folder: Path, level: SleepLevel, **changes: Any
) -> WeightPusher:
    return WeightPusher(
        url,
        url,
        checkpoint=checkpoint,
        directory=folder,
        sleep=SleepSettings(level, folder / "state"),
        **changes,
    )


def with_plan(pusher: WeightPusher) -> RememberedPlan:
    plan = RememberedPlan()
    assert isinstance(pusher._swap.halt, EngineSleep)
    pusher._swap.halt._guard = plan  # type: ignore[assignment]
    return plan


@pytest.fixture(params=[1, 2])
def level(request: pytest.FixtureRequest) -> SleepLevel:
    chosen: SleepLevel = request.param
    return chosen


@pytest.fixture
def pusher(
    engine: SleepingEngine, checkpoint: Path, tmp_path: Path, level: SleepLevel
) -> Iterator[WeightPusher]:
    with make_pusher(engine.url, checkpoint, tmp_path, level) as pusher:
        with_plan(pusher)
        yield pusher
    assert list(tmp_path.iterdir()) == []


def push(
    engine: SleepingEngine,
    pusher: WeightPusher,
    version: int,
    verify: Callable[[], object] | None = None,
) -> dict[str, float]:
    engine.weights[version] = float(version)
    tensors = [("w", torch.tensor([float(version)]))]
    return pusher.push(version, tensors, verify).seconds


def asleep(level: SleepLevel) -> list[str]:
    return ["/api/push/hold", f"/sleep {level} keep"]


def test_a_step_is_made_while_the_engine_sleeps_and_its_push_wakes_it(
    engine: SleepingEngine, pusher: WeightPusher, level: SleepLevel
) -> None:
    pusher.stop_engine()
    assert engine.calls == asleep(level)
    assert engine.state.asleep == {"weights", "kv_cache"}
    seconds = push(engine, pusher, 1, lambda: engine.calls.append("verify"))
    expected = [*PUSHED[:-1], "verify", PUSHED[-1]]
    assert engine.calls[2:] == expected
    assert engine.serves
    assert engine.state.version == 1
    assert list(seconds) == [
        "hold", "sleep", "write", "wake_weights", "load", "set_version", "wake_cache", "resume",
        "verify", "release",
    ]  # fmt: skip
    pusher.wake_engine()  # it is awake: nothing to do
    assert len(engine.calls) == 2 + len(expected)


def test_nothing_is_renewed_after_the_release(
    engine: SleepingEngine, pusher: WeightPusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hold that came then would keep calls waiting for nothing."""
    pusher.stop_engine()
    assert isinstance(pusher._swap.halt, EngineSleep)
    guard = pusher._swap.halt._guard
    disarm = guard.disarm

    def disarm_late() -> None:
        pusher._swap.proxy.hold(drain_s=0)
        disarm()

    monkeypatch.setattr(guard, "disarm", disarm_late)
    pusher.wake_engine()
    assert engine.serves


def test_the_seconds_of_a_sleep_are_those_of_its_own_push(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.stop_engine()
    pusher.wake_engine()
    assert "sleep" in push(engine, pusher, 1)
    pusher.stop_engine()
    first = pusher._swap.watch.seconds["sleep"]
    assert push(engine, pusher, 2)["sleep"] == first


def test_a_step_without_a_push_wakes_it_as_it_was(
    engine: SleepingEngine, pusher: WeightPusher, level: SleepLevel
) -> None:
    push(engine, pusher, 1)
    before = len(engine.calls)
    pusher.stop_engine()
    pusher.wake_engine()
    load = LOAD if level == 2 else []
    assert engine.calls[before:] == [*asleep(level), "/wake_up weights", *load, *GO_ON]
    assert engine.state.weight == 1.0
    assert engine.serves


def test_a_push_without_a_step_puts_it_to_sleep_itself(
    engine: SleepingEngine, pusher: WeightPusher, level: SleepLevel
) -> None:
    """The first one of a trainer. So it finds an engine in whatever state one left that was
    killed, its guard with it."""
    engine.state.asleep, engine.state.paused, engine.state.weight = {"kv_cache"}, True, None
    engine.state.updating = True
    push(engine, pusher, 1)
    assert engine.calls[:3] == [*asleep(level), "/wake_up weights"]
    assert engine.serves
    assert engine.state.weight == 1.0


def test_a_sleep_that_fails_half_way_leaves_it_awake_and_says_why(
    engine: SleepingEngine, pusher: WeightPusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(query: dict[str, str], body: dict[str, Any]) -> None:
        engine.state.paused, engine.state.weight = True, None
        raise Refused("Memory usage increased after sleeping.")

    monkeypatch.setattr(engine, "sleep", fail)
    why = r"gpus\.share: vLLM does not sleep \(.*--enable-sleep-mode\?\): vLLM refused /sleep"
    with pytest.raises(PushError, match=why) as caught:
        pusher.stop_engine()
    assert not isinstance(caught.value, EngineLostError)
    assert engine.serves
    assert engine.state.weight == MODEL_FOLDER
    monkeypatch.undo()
    push(engine, pusher, 1)


def test_an_engine_that_neither_sleeps_nor_goes_on_is_left_to_the_guard(
    engine: SleepingEngine, checkpoint: Path, tmp_path: Path, level: SleepLevel
) -> None:
    pusher = make_pusher(engine.url, checkpoint, tmp_path, level)
    guard = with_plan(pusher)
    engine.refuse = lambda number, path: path.startswith("/sleep") or path == "/resume"
    with pytest.raises(EngineLostError, match=r"refused /sleep.*does not go on: vLLM refused /res"):
        pusher.stop_engine()
    pusher.close()
    assert "/api/push/release" not in engine.calls
    assert not engine.serves
    engine.refuse = lambda number, path: False
    carry_out(engine, guard.plan, level)
    assert engine.serves
    assert engine.state.weight == MODEL_FOLDER


@pytest.mark.parametrize("call", ["/wake_up weights", *LOAD[1:], "/api/push/version"])
def test_a_push_that_fails_wakes_it_with_the_weights_of_before(
    engine: SleepingEngine, pusher: WeightPusher, call: str
) -> None:
    push(engine, pusher, 1)
    pusher.stop_engine()
    engine.refuse_once(call)
    with pytest.raises(PushError, match=r"version 2 is not served, version 1 still is.*not today"):
        push(engine, pusher, 2)
    assert (engine.state.version, engine.state.weight) == (1, 1.0)
    assert engine.serves
    push(engine, pusher, 3)
    assert engine.serves


def test_weights_that_are_not_finite_leave_it_asleep_until_the_step_is_over(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.stop_engine()
    with pytest.raises(PushError, match="not finite"):
        pusher.push(1, [("w", torch.tensor([float("nan")]))])
    assert engine.state.asleep
    pusher.wake_engine()
    assert engine.serves


def test_a_failed_verification_puts_the_old_weights_back_without_a_sleep(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.stop_engine()

    def verify() -> None:
        engine.calls.append("verify")
        raise ArithmeticError("off by 3 nats")

    with pytest.raises(PushError, match="served wrongly, version 0 is back: off by 3 nats"):
        push(engine, pusher, 1, verify)
    back = engine.calls[engine.calls.index("verify") + 1 :]
    assert back == ["/pause keep true", *LOAD, "/api/push/version", *GO_ON]
    assert (engine.state.version, engine.state.weight) == (0, MODEL_FOLDER)
    assert engine.serves


def test_a_first_push_that_slept_deeply_names_the_setting(
    engine: SleepingEngine, checkpoint: Path, tmp_path: Path, level: SleepLevel
) -> None:
    """What level 2 loses, and no push brings, shows there."""

    def verify() -> None:
        raise ArithmeticError("off by 3 nats")

    with make_pusher(engine.url, checkpoint, tmp_path, level, version=-1) as pusher:
        with_plan(pusher)
        with pytest.raises(PushError, match=r"served wrongly.*off by 3 nats") as caught:
            push(engine, pusher, 0, verify)
        assert ("gpus.sleep_level = 2" in str(caught.value)) == (level == 2)
        push(engine, pusher, 1)
        with pytest.raises(PushError) as caught:
            push(engine, pusher, 2, verify)
        assert "gpus.sleep_level" not in str(caught.value)


@pytest.mark.parametrize("call", ["/wake_up weights", "/wake_up kv_cache"])
def test_an_engine_that_does_not_wake_is_left_to_the_guard(
    engine: SleepingEngine, checkpoint: Path, tmp_path: Path, level: SleepLevel, call: str
) -> None:
    """As where the ranks' memory is in its way: it wakes when they have ended."""
    pusher = make_pusher(engine.url, checkpoint, tmp_path, level)
    guard = with_plan(pusher)
    push(engine, pusher, 1)
    pusher.stop_engine()
    engine.refuse = lambda number, path: path == call
    with pytest.raises(EngineLostError, match=r"restart it: .*vLLM refused /wake_up"):
        push(engine, pusher, 2)
    pusher.close()
    assert engine.calls[-1] != "/api/push/release"
    engine.refuse = lambda number, path: False
    carry_out(engine, guard.plan, level)
    assert engine.serves
    assert engine.state.weight == engine.weights[engine.state.version]


def carry_out(engine: SleepingEngine, plan: WakePlan | None, level: SleepLevel) -> None:
    assert plan is not None
    vllm = VllmControl(engine.url, 30)
    proxy = ProxyControl(engine.url, 30, key=None, hold_ttl_s=60)
    bring_back(plan, vllm, proxy, level=level)
    vllm.close()
    proxy.close()


class Killed(BaseException):
    """Nothing more is done by who was killed."""


@pytest.mark.parametrize("proxy_too", [False, True])
@pytest.mark.parametrize("step", ["pushed", "skipped", "pushed wrongly"])
@pytest.mark.parametrize(("level", "adapter"), [(1, None), (2, None), (1, {"r": 4})])
def test_a_trainer_that_is_killed_before_or_after_any_call(
    server: SleepingEngine,
    checkpoint: Path,
    tmp_path: Path,
    level: SleepLevel,
    adapter: dict[str, int] | None,
    step: str,
    proxy_too: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the guard was told last brings the engine back: never wrong weights under a version,
    and no call that waits for ever. `proxy_too`: it is killed as well, and started again."""

    def verify() -> None:
        if step == "pushed wrongly":
            raise ArithmeticError("far off")

    for after in (False, True):
        for nth in range(1, 25):
            server.reset()
            server.serves_adapters = adapter is not None
            pusher = make_pusher(server.url, checkpoint, tmp_path, level, adapter=adapter)
            guard = with_plan(pusher)
            push(server, pusher, 1)
            killed = True
            with monkeypatch.context() as patch:
                patch.setattr(Peer, "post", killed_at(nth, after=after))
                try:
                    pusher.stop_engine()
                    if step != "skipped":
                        push(server, pusher, 2, verify)
                    pusher.wake_engine()
                    killed = False
                except PushError:
                    killed = False
                except Killed:
                    pass
            if guard.plan is not None:
                if proxy_too:
                    server.start_proxy_again(version=1)
                carry_out(server, guard.plan, level)
            elif killed:
                # Only the release was left, and a hold opens where nobody renews it.
                assert server.calls[-1] in ("/resume", "/api/push/release")
                server.state.held = False
            assert server.wrong == []
            assert server.serves, server.calls
            pusher._files.close()
            if not killed:
                assert nth > len(GO_ON if step == "skipped" else PUSHED)
                break
        else:
            raise AssertionError("it was killed each time")


def test_weights_that_the_engine_has_gone_on_with_are_kept(
    engine: SleepingEngine, checkpoint: Path, tmp_path: Path, level: SleepLevel
) -> None:
    pusher = make_pusher(engine.url, checkpoint, tmp_path, level)
    guard = with_plan(pusher)
    push(engine, pusher, 1)

    def verify() -> None:
        raise Killed

    with pytest.raises(Killed):
        push(engine, pusher, 2, verify)
    carry_out(engine, guard.plan, level)
    assert engine.loaded == [1.0, 2.0]
    assert (engine.state.version, engine.serves) == (2, True)
    pusher._files.close()


@pytest.mark.parametrize("after", [False, True])
def test_a_first_push_that_is_killed_opens_no_gate_and_no_number_is_of_other_weights(
    server: SleepingEngine,
    checkpoint: Path,
    tmp_path: Path,
    level: SleepLevel,
    after: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody has said yet that the new weights are right. But the hold ends by itself, and calls
    are recorded as of the proxy's version: 4 of an earlier run, 5, or 0 of the model's folder."""
    for nth in range(1, 25):
        server.reset()
        server.weights[4] = server.state.weight = 4.0
        server.state.version = 4
        pusher = make_pusher(server.url, checkpoint, tmp_path, level, version=-1)
        guard = with_plan(pusher)
        with monkeypatch.context() as patch:
            patch.setattr(Peer, "post", killed_at(nth, after=after))
            try:
                push(server, pusher, 5)
                killed = False
            except Killed:
                killed = True
        pusher._files.close()
        if guard.plan is None:
            break
        assert killed
        released = server.calls.count("/api/push/release")
        carry_out(server, guard.plan, level)
        assert server.calls.count("/api/push/release") == released == 0
        assert not server.state.paused
        assert not server.state.asleep
        server.state.held = False  # its time is over
        server.check("the hold ends")
        assert server.wrong == [], (nth, server.calls)
    assert nth > len(PUSHED)


def killed_at(nth: int, *, after: bool) -> Callable[..., None]:
    """In place of `Peer.post`: the `nth` call is the last, made or not."""
    post, count = Peer.post, 0

    def dying(peer: Peer, path: str, **request: Any) -> None:
        nonlocal count
        count += 1
        if count < nth or (after and count == nth):
            post(peer, path, **request)
        if count >= nth:
            raise Killed

    return dying


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_is_refused_it_serves_what_it_says_or_is_left_to_the_guard(
    server: SleepingEngine,
    checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    server.reset()
    level: SleepLevel = data.draw(st.sampled_from([1, 2]))
    pusher = make_pusher(server.url, checkpoint, tmp_path_factory.mktemp("push"), level)
    guard = with_plan(pusher)
    push(server, pusher, 1)
    refused = data.draw(st.sets(st.integers(8, 60), max_size=5))
    server.refuse = lambda number, path: number in refused and "release" not in path

    def verify() -> None:
        if data.draw(st.booleans()):
            raise ArithmeticError("far off")

    try:
        for version in range(2, 5):
            try:
                pusher.stop_engine()
                if data.draw(st.booleans()):
                    push(server, pusher, version, verify)
            except EngineLostError:
                raise
            except PushError:
                pass
            pusher.wake_engine()
            assert server.serves, server.calls
            assert server.state.version == pusher.version
            assert guard.plan is None
    except EngineLostError:
        assert server.state.held or server.state.paused
        server.refuse = lambda number, path: False
        carry_out(server, guard.plan, level)
    assert server.wrong == []
    assert server.serves, server.calls
    pusher.close()


class Learner:
    """What a publisher needs of one to stop the engine."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.engine = self
        self.resharded = 0

    def reshard(self) -> None:
        self.resharded += 1


def make_publisher(pusher: WeightPusher, *, share: bool) -> WeightPublisher:
    publisher = object.__new__(WeightPublisher)
    publisher.settings = SimpleNamespace(gpus=GpuSettings(share=share))  # type: ignore[assignment]
    publisher.learner = Learner()  # type: ignore[assignment]
    publisher.pusher = pusher
    return publisher


@pytest.mark.usefixtures("one_rank")
def test_a_skipped_step_frees_its_memory_before_the_engine_wakes(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    publisher = make_publisher(pusher, share=True)
    learner: Any = publisher.learner
    engine.refuse = lambda number, path: "wake_up" in path and learner.resharded == 0
    with publisher.engine_stopped():
        assert engine.state.asleep
    assert engine.serves


@pytest.mark.usefixtures("one_rank")
def test_a_step_that_fails_leaves_the_wake_to_the_guard(
    engine: SleepingEngine, checkpoint: Path, tmp_path: Path
) -> None:
    """The error's frames hold what the step had on the GPU."""
    pusher = make_pusher(engine.url, checkpoint, tmp_path, 2)
    guard = with_plan(pusher)
    publisher = make_publisher(pusher, share=True)
    with pytest.raises(ZeroDivisionError), publisher.engine_stopped():
        raise ZeroDivisionError
    pusher.close()
    assert engine.state.asleep
    carry_out(engine, guard.plan, level)
    assert engine.serves


@pytest.mark.usefixtures("one_rank")
def test_ranks_with_gpus_of_their_own_let_the_engine_serve(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    with make_publisher(pusher, share=False).engine_stopped():
        pass
    assert engine.calls == []


def test_a_sleep_that_frees_nothing_is_said(
    pusher: WeightPusher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = make_publisher(pusher, share=True)
    for after, warned in ((10 << 20, True), (900 << 20, False)):
        monkeypatch.setattr(publish, "_free_bytes", lambda device, free=after: free)
        with caplog.at_level(logging.INFO, logger=publish.logger.name):
            caplog.clear()
            publisher._report_sleep(10 << 20)
        said = our_lines(caplog)[0]
        assert said == f"vLLM sleeps: {after >> 20} MiB of the GPU are free, 10 before"
        assert ("--enable-sleep-mode" in caplog.text) == warned


def test_a_shared_gpu_sets_what_a_sleep_needs(tmp_path: Path) -> None:
    """vLLM's option, and a limit for the engine's silence that a step does not reach."""
    given = trainer_settings(tmp_path).model_dump(exclude_unset=True)
    for proxy, limit in (({}, 3600), ({"read_timeout_s": 30}, 30)):
        shared = TrainerSettings.model_validate(
            given | {"gpus": {"share": True}, "proxy": given.get("proxy", {}) | proxy}
        )
        assert shared.vllm.sleep_mode
        assert shared.proxy.read_timeout_s == limit
        assert shared.proxy.max_wait_s == 3600
    alone = TrainerSettings.model_validate(given)
    assert not alone.vllm.sleep_mode
    assert (alone.proxy.read_timeout_s, alone.proxy.max_wait_s) == (600, 900)


def test_vllm_is_started_for_it(checkpoint: Path) -> None:
    given = {"model": str(checkpoint), "device": "cuda"}
    assert "--enable-sleep-mode" in VllmSettings(**given, sleep_mode=True).arguments()
    assert "--enable-sleep-mode" not in VllmSettings(**given).arguments()
    # The CPU build refuses the option (vLLM 0.32: "not supported on current platform").
    on_cpu = VllmSettings(model=str(checkpoint), device="cpu", sleep_mode=True)
    assert "--enable-sleep-mode" not in on_cpu.arguments()


# The process


def test_calls_wait_as_long_as_it_sleeps_and_not_longer(
    engine: SleepingEngine, checkpoint: Path, tmp_path: Path
) -> None:
    """However short a hold is: the guard renews it, without a wait for calls, and stops first."""
    ttl_s = 0.3
    with make_pusher(engine.url, checkpoint, tmp_path, 1, hold_ttl_s=ttl_s, drain_s=7) as pusher:
        pusher.stop_engine()
        eventually(lambda: engine.calls.count("/api/push/hold") > 4, seconds=60)
        holds = [body for body in engine.bodies if "ttl_s" in body]
        assert holds[0] == {"ttl_s": ttl_s, "drain_s": 7}
        assert holds[1:] == [{"ttl_s": ttl_s, "drain_s": 0}] * len(holds[1:])
        pusher.wake_engine()
        made = len(engine.calls)
        time.sleep(3 * ttl_s)
        assert engine.calls[made:] == []
        assert engine.calls[-1] == "/api/push/release"


@pytest.mark.parametrize(
    ("timeout_s", "sleep", "ttl_s"),
    [(30, False, 120), (900, False, 900), (9000, False, 3600), (900, True, 120)],
)
def test_a_hold_lasts_as_long_as_a_request_may(
    engine: SleepingEngine,
    checkpoint: Path,
    tmp_path: Path,
    timeout_s: float,
    sleep: bool,
    ttl_s: float,
) -> None:
    """Nobody renews the hold of an engine that is only paused; the proxy takes an hour at most."""
    settings = SleepSettings(1, tmp_path / "state") if sleep else None
    url, options = engine.url, {"timeout_s": timeout_s, "directory": tmp_path}
    with WeightPusher(url, url, checkpoint=checkpoint, sleep=settings, **options) as pusher:
        if sleep:
            with_plan(pusher)
        push(engine, pusher, 1)
    [hold] = [body for body in engine.bodies if "ttl_s" in body]
    assert hold["ttl_s"] == ttl_s


TRAINER = """
import faulthandler, sys, time
from pathlib import Path
import torch
from tracegrad_trainer.inference.engine_sleep import SleepSettings
from tracegrad_trainer.inference.weight_push import WeightPusher
from tracegrad_trainer.launch.folder_lock import lock_for_ranks

url, checkpoint, folder, level = sys.argv[1:]
state = Path(folder) / "state"
lock = lock_for_ranks(state)
pusher = WeightPusher(url, url, checkpoint=Path(checkpoint), directory=Path(folder),
                      sleep=SleepSettings(int(level), state))
with pusher:
    pusher.push(1, [("w", torch.tensor([1.0]))])
    pusher.stop_engine()
    faulthandler.dump_traceback_later(120, exit=True)
    print("asleep", flush=True)
    # Short: a signal between Python's last look for one and the call of a long sleep is slept over.
    while True:
        time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_trainer_that_ends_leaves_an_engine_that_wakes(
    engine: SleepingEngine, checkpoint: Path, tmp_path: Path, level: SleepLevel, number: int
) -> None:
    """Killed, or with Ctrl-C, which a terminal sends to all of its process group; the files that
    it was loaded from are gone at the end, and the state folder is free."""
    engine.weights[1] = 1.0
    arguments = [engine.url, str(checkpoint), str(tmp_path), str(level)]
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"asleep\n"
    before = len(engine.calls)
    os.killpg(trainer.pid, number)
    ended = trainer.wait()
    assert trainer.stderr is not None
    assert ended == -number, trainer.stderr.read()
    eventually(lambda: engine.calls[-1] == "/api/push/release", seconds=60)
    load = [*(LOAD if level == 2 else []), "/api/push/version"]
    sleep = f"/sleep {level} keep"
    woken = [call for call in engine.calls[before:] if call != "/api/push/hold"]
    assert woken == [sleep, "/wake_up weights", *load, *GO_ON]
    assert (engine.state.version, engine.state.weight) == (1, 1.0)
    assert engine.serves
    eventually(lambda: [entry.name for entry in tmp_path.iterdir()] == ["state"], seconds=60)
    lock_for_ranks(tmp_path / "state").close()
    assert b"the trainer ended while vLLM slept: it is awake" in trainer.stderr.read()


def test_the_guard_holds_no_more_memory_than_it_must() -> None:
    """It lives as long as the trainer does."""
    check = "import sys, tracegrad_trainer.inference.wake_guard; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_guard_tries_until_torchrun_has_killed_the_other_ranks() -> None:
    """Till then their memory is in the engine's way."""
    grace_s = inspect.signature(PContext.close).parameters["timeout"].default
    assert (ATTEMPTS - 1) * PAUSE_S > 1.5 * grace_s > 0


def guarded(url: str, proxy: str, folder: Path) -> GuardedEngine:
    return GuardedEngine(url, (proxy,), None, 120, 30, state_dir=str(folder), sleep_level=2)


def test_a_guard_tries_again_where_vllm_refuses_and_not_where_it_is_gone(
    engine: SleepingEngine, tmp_path: Path
) -> None:
    plan = WakePlan(ServedWeights(0, ()), load=False, open_gate=True, folder=str(tmp_path))
    call = "/wake_up weights"
    engine.refuse = lambda number, path: path == call and engine.calls.count(path) < 3
    wake(plan, guarded(engine.url, engine.url, tmp_path), pause_s=0)
    assert engine.calls.count(call) == 3
    assert engine.serves
    engine.calls.clear()
    gone = f"http://127.0.0.1:{find_free_port()}"
    with pytest.raises(EngineLostError, match=f"vLLM at {gone} does not answer /sleep"):
        wake(plan, guarded(gone, engine.url, tmp_path), pause_s=0)
    assert engine.calls == ["/api/push/hold"]


def test_a_plan_that_changes_puts_off_no_renewal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = WakePlan(ServedWeights(0, ()), load=False, open_gate=True, folder=str(tmp_path))
    orders = [(at, json.dumps(asdict(plan)) + "\n") for at in (0, 30, 60, 90)] + [(130, "")]
    now = 0.0
    renewed: list[float] = []

    def wait(readers: list[object], _: object, __: object, left_s: float | None) -> list[object]:
        nonlocal now
        at = orders[0][0]
        is_first = left_s is None or at <= now + left_s
        now = at if is_first else now + (left_s or 0)
        return [readers if is_first else []]

    monkeypatch.setattr(wake_guard, "select", SimpleNamespace(select=wait))
    monkeypatch.setattr(wake_guard, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(wake_guard, "renew", lambda proxy: renewed.append(now))
    lines: Any = SimpleNamespace(readline=lambda: orders.pop(0)[1])
    url = "http://127.0.0.1:1"
    assert wake_guard.watch(lines, io.StringIO(), guarded(url, url, tmp_path)) == plan
    assert renewed == [40, 80, 120]


def test_a_guard_waits_where_another_trainer_has_begun(
    engine: SleepingEngine, checkpoint: Path, tmp_path: Path
) -> None:
    """Whose first push wakes the engine; two that load weights at once would be a mixture."""
    pusher = make_pusher(engine.url, checkpoint, tmp_path, 2)
    pusher.stop_engine()
    made = len(engine.calls)
    with lock_for_ranks(tmp_path / "state"):
        assert isinstance(pusher._swap.halt, EngineSleep)
        pusher._swap.halt._guard.close()  # as the end of this process would
    assert engine.calls[made:] == []


def test_files_that_a_guard_needs_are_not_left_behind(
    engine: SleepingEngine, checkpoint: Path, tmp_path: Path
) -> None:
    """Another trainer on this host clears away after those that were killed."""
    pusher = make_pusher(engine.url, checkpoint, tmp_path, 2)
    push(engine, pusher, 1)
    pusher.stop_engine()
    files = pusher._files
    os.close(files.lock)  # as the end of this process would
    remove_left_behind(PREFIX, tmp_path)
    assert list(files.folder.glob("1/*.safetensors"))
    assert isinstance(pusher._swap.halt, EngineSleep)
    pusher._swap.halt._guard.close()
    assert engine.serves
    assert engine.state.version == 1
    assert not files.folder.exists()


def test_a_guard_that_has_ended_is_started_again(
    engine: SleepingEngine, checkpoint: Path, tmp_path: Path
) -> None:
    with make_pusher(engine.url, checkpoint, tmp_path, 2) as pusher:
        push(engine, pusher, 1)
        assert isinstance(pusher._swap.halt, EngineSleep)
        first = pusher._swap.halt._guard._process
        assert first is not None
        first.kill()
        first.wait()
        pusher.stop_engine()
        second = pusher._swap.halt._guard._process
        assert second is not None
        assert second.poll() is None
        pusher.wake_engine()
        assert engine.serves


def test_a_dead_engine_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{find_free_port()}"
    pusher = WeightPusher(
        url, checkpoint=checkpoint, directory=tmp_path, sleep=SleepSettings(2, tmp_path / "state")
    )
    guard = with_plan(pusher)
    with pytest.raises(EngineLostError, match=f"vLLM at {url} does not answer /sleep"):
        pusher.stop_engine()
    guard.plan = None


def test_level_2_needs_files_to_return_to(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpoint: sleep level 2 keeps no weights"):
        WeightPusher("http://127.0.0.1:1", sleep=SleepSettings(2, tmp_path))


def test_level_2_serves_no_adapters(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adapter: sleep level 2 throws the weights beneath"):
        make_pusher("http://127.0.0.1:1", checkpoint, tmp_path, 2, adapter={"r": 4})
