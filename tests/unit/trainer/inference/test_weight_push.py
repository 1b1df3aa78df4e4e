"""The order of a push to engines that pause, and what happens when a step of it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import save_file

from support.trainer.sleeping_engine import MODEL_FOLDER, SleepingEngine
from tracegrad_trainer.inference.control_routes import (
    EngineLostError,
    PushError,
    ServedWeights,
)
from tracegrad_trainer.inference.weight_push import SupersededError, WeightPusher
from tracegrad_trainer.utils.network import find_free_port


@pytest.fixture
def engine() -> Iterator[SleepingEngine]:
    engine = SleepingEngine()
    engine.weights |= {1: 1.0, 2: 2.0, 3: 3.0}
    yield engine
    engine.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"w": torch.tensor([MODEL_FOLDER])}, folder / "model.safetensors")
    return folder


@pytest.fixture
def pusher(engine: SleepingEngine, checkpoint: Path, tmp_path: Path) -> Iterator[WeightPusher]:
    shared = tmp_path / "shm"
    shared.mkdir()
    with WeightPusher(engine.url, engine.url, checkpoint=checkpoint, directory=shared) as pusher:
        yield pusher
    assert list(shared.iterdir()) == []
    assert engine.wrong == []


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.tensor([value]))]


PAUSE = "/pause keep true"
LOAD = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
STAGE, LOAD_STAGED = LOAD[:2], LOAD[2]


def test_a_push_walks_in_order(engine: SleepingEngine, pusher: WeightPusher) -> None:
    def verify() -> None:
        engine.calls.append("verify")
        engine.bodies.append({})

    report = pusher.push(1, weights(1.0), verify)
    assert engine.calls == [
        *STAGE, "/api/push/hold", PAUSE, LOAD_STAGED, "/api/push/version", "/resume",
        "/api/push/release", "verify",
    ]  # fmt: skip
    assert engine.sent("/finish_weight_update") == [{"weight_version": "1"}]
    assert engine.sent("/api/push/version") == [{"version": 1}]
    assert engine.loaded == [1.0]
    assert pusher.version == 1
    stages = ["write", "stage", "hold", "pause", "load", "set_version", "resume", "release"]
    assert list(report.seconds) == [*stages, "verify"]
    assert report.paused_s == sum(report.seconds[stage] for stage in stages[3:7])
    assert report.held_s == sum(report.seconds[stage] for stage in stages[2:])


def test_an_engine_on_gpus_gets_files_in_one_request(
    engine: SleepingEngine, checkpoint: Path
) -> None:
    """It makes nothing ready: to be asked to would be a request for each 8 MiB."""
    with WeightPusher(
        engine.url, engine.url, checkpoint=checkpoint, directory=checkpoint, stages=False
    ) as pusher:
        pusher.push(1, weights(1.0))
    assert engine.calls[:5] == ["/api/push/hold", PAUSE, *LOAD]
    [update] = engine.sent("/update_weights")
    assert update["update_info"].keys() == {"paths"}
    assert engine.serves


def test_calls_wait_until_a_first_push_is_verified(
    engine: SleepingEngine, checkpoint: Path
) -> None:
    with WeightPusher(engine.url, engine.url, checkpoint=checkpoint, version=-1) as first:
        report = first.push(0, weights(1.0), lambda: engine.calls.append("verify"))
    assert engine.calls[-3:] == ["verify", "/api/push/release", "/api/push/canary"]
    assert report.held_s is not None
    assert report.held_s >= report.seconds["verify"]


@pytest.mark.parametrize("call", STAGE)
def test_what_cannot_be_made_ready_holds_no_call(
    engine: SleepingEngine, pusher: WeightPusher, call: str
) -> None:
    engine.refuse = lambda number, path: path == call
    with pytest.raises(PushError, match=r"version 1 is not pushed: vLLM refused .*not today"):
        pusher.push(1, weights(1.0))
    assert set(engine.calls) <= set(LOAD)
    assert pusher.version == 0

    engine.refuse = lambda number, path: False
    pusher.push(2, weights(2.0))
    assert engine.loaded[-1] == 2.0


def test_the_version_before_is_put_back_not_the_checkpoint(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    engine.refuse_once("/api/push/version")
    with pytest.raises(PushError, match="the proxy refused /api/push/version"):
        pusher.push(2, weights(2.0))
    assert engine.loaded == [1.0, 2.0, 1.0]
    assert engine.calls[-3:] == ["/api/push/version", "/resume", "/api/push/release"]
    assert engine.sent("/api/push/version")[-1] == {"version": 1}


def test_a_failed_verification_puts_the_old_weights_back(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    def verify() -> None:
        raise ArithmeticError("off by 3 nats")

    with pytest.raises(PushError, match="served wrongly, version 0 is back: off by 3 nats"):
        pusher.push(1, weights(1.0), verify)
    assert engine.loaded == [1.0, 0.5]
    back = [PAUSE, *LOAD, "/api/push/version", "/resume", "/api/push/release"]
    assert engine.calls[-len(back) :] == back
    assert engine.sent("/api/push/version")[-1] == {"version": 0}


def test_a_kept_cache_is_cleared_where_a_number_is_served_again(
    engine: SleepingEngine, checkpoint: Path
) -> None:
    """Calls have it as their salt, also those that other weights went on with, and those of an
    earlier run."""

    def pauses() -> list[str]:
        found = [call for call in engine.calls if call.startswith("/pause")]
        engine.calls.clear()
        engine.bodies.clear()
        return found

    def verify() -> None:
        raise ArithmeticError("off by 3 nats")

    with WeightPusher(engine.url, engine.url, checkpoint=checkpoint, keep_cache=True) as pusher:
        pusher.push(1, weights(1.0))
        assert pauses() == [PAUSE]
        with pytest.raises(PushError, match="version 1 is back"):
            pusher.push(2, weights(2.0), verify)
        assert pauses() == ["/pause keep false", PAUSE]
        pusher.push(3, weights(3.0))
        pauses()
        pusher.roll_back(1, fetching({1: 1.0}))
        assert pauses() == [PAUSE]


def test_an_engine_without_weights_is_not_resumed(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    engine.refuse = lambda number, path: path == LOAD_STAGED
    with pytest.raises(EngineLostError, match="paused without usable weights, restart it"):
        pusher.push(1, weights(1.0))
    assert "/resume" not in engine.calls
    assert engine.calls[-1] == "/api/push/release"


def test_an_update_that_a_killed_pusher_left_open_is_ended_first(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    engine.state.updating = True
    pusher.push(1, weights(1.0))
    assert engine.calls[:4] == [*STAGE, *STAGE]
    assert engine.loaded == [1.0]


def test_what_was_served_returns_after_a_finish_that_failed(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    engine.refuse_once("/finish_weight_update")
    with pytest.raises(PushError, match=r"version 1 is not served, version 0 still is.*finish"):
        pusher.push(1, weights(1.0))
    assert engine.loaded == [1.0, 0.5]
    assert engine.calls[-2:] == ["/resume", "/api/push/release"]


def test_nothing_is_held_for_weights_that_are_not_finite(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    with pytest.raises(PushError, match="w holds values that are not finite"):
        pusher.push(1, weights(float("nan")))
    assert engine.calls == []
    assert pusher._swap.watch.seconds == {}, "they are of no other push"


def test_a_version_is_pushed_once(pusher: WeightPusher) -> None:
    pusher.push(1, weights(1.0))
    with pytest.raises(ValueError, match="version: 1 is served already"):
        pusher.push(1, weights(2.0))


def test_a_dead_engine_is_one_line(engine: SleepingEngine, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{find_free_port()}"
    with (
        WeightPusher(url, engine.url, directory=tmp_path) as pusher,
        pytest.raises(EngineLostError, match=f"vLLM at {url} does not answer /start") as caught,
    ):
        pusher.push(1, weights(1.0))
    assert "\n" not in str(caught.value)
    assert engine.calls == []


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint: no \*\.safetensors"):
        WeightPusher("http://127.0.0.1:1", checkpoint=tmp_path)


@pytest.fixture
def both(
    engine: SleepingEngine, second: SleepingEngine, checkpoint: Path, tmp_path: Path
) -> Iterator[WeightPusher]:
    urls = [engine.url, second.url]
    with WeightPusher(urls, engine.url, checkpoint=checkpoint, directory=tmp_path) as pusher:
        yield pusher


second = engine


def test_a_push_goes_to_all_engines(
    engine: SleepingEngine, second: SleepingEngine, both: WeightPusher
) -> None:
    both.push(1, weights(1.0))
    assert second.calls == [*STAGE, PAUSE, LOAD_STAGED, "/resume"]
    assert [path for path in engine.calls if not path.startswith("/api/")] == second.calls
    assert engine.calls.count("/api/push/version") == 1
    assert engine.loaded == second.loaded == [1.0]


def test_what_one_engine_refuses_is_taken_back_from_all(
    engine: SleepingEngine, second: SleepingEngine, both: WeightPusher
) -> None:
    both.push(1, weights(1.0))
    second.refuse_once(LOAD_STAGED)
    with pytest.raises(PushError, match=f"version 1 still is: engine {second.url}: .*not today"):
        both.push(2, weights(2.0))
    assert engine.loaded == second.loaded == [1.0, 2.0, 1.0]
    assert both.version == 1
    assert engine.calls[-1] == "/api/push/release"
    assert second.calls[-1] == "/resume"
    both.push(3, weights(3.0))
    assert engine.loaded[-1] == second.loaded[-1] == 3.0


def test_a_pause_that_one_engine_refuses_holds_none(
    engine: SleepingEngine, second: SleepingEngine, both: WeightPusher
) -> None:
    second.refuse_once(PAUSE)
    with pytest.raises(PushError, match=f"engine {second.url}"):
        both.push(1, weights(1.0))
    assert engine.calls[-4:] == [PAUSE, "/resume", "/api/push/release", LOAD[1]]
    assert LOAD_STAGED not in engine.calls + second.calls
    assert [each.state.updating for each in (engine, second)] == [False, False]


def test_where_one_engine_is_lost_the_others_serve_what_they_did(
    engine: SleepingEngine, second: SleepingEngine, both: WeightPusher
) -> None:
    both.push(1, weights(1.0))

    second.refuse = gone_at(LOAD_STAGED)
    with pytest.raises(EngineLostError, match=f"engine {second.url}: .*does not answer"):
        both.push(2, weights(2.0))
    assert engine.loaded == [1.0, 2.0, 1.0]
    assert both.version == 1
    assert engine.calls[-2:] == ["/resume", "/api/push/release"]


def test_where_one_engine_is_lost_in_a_first_push_the_others_serve_the_model_folder(
    engine: SleepingEngine, second: SleepingEngine, checkpoint: Path, tmp_path: Path
) -> None:
    urls = [engine.url, second.url]
    second.refuse = gone_at(LOAD_STAGED)
    with WeightPusher(
        urls, engine.url, version=-1, checkpoint=checkpoint, directory=tmp_path
    ) as pusher:
        with pytest.raises(EngineLostError, match=f"engine {second.url}: .*does not answer"):
            pusher.push(1, weights(1.0))
        assert pusher.version == -1
    assert serves(engine) == (0.5, 0)
    assert engine.calls[-2:] == ["/resume", "/api/push/release"]


def test_one_of_the_engines_that_was_started_again_gets_what_is_served(
    engine: SleepingEngine, second: SleepingEngine, both: WeightPusher
) -> None:
    both.push(1, weights(1.0))
    second.start_again()
    assert both.restore()
    assert (engine.state.weight, second.state.weight) == (1.0, 1.0)
    assert not both.restore()


def test_an_engine_that_is_gone_before_an_update_is_asked_once(
    second: SleepingEngine, both: WeightPusher
) -> None:
    second.refuse = gone_at(STAGE[0])
    with pytest.raises(EngineLostError, match=f"engine {second.url}: .*does not answer"):
        both.push(1, weights(1.0))
    assert second.calls == [STAGE[0]]


def test_an_engine_that_hangs_is_waited_for_once_and_calls_are_held_meanwhile(
    engine: SleepingEngine, second: SleepingEngine, checkpoint: Path, tmp_path: Path
) -> None:
    over = Event()
    second.refuse = lambda number, path: path == LOAD_STAGED and over.wait(60)
    urls = [engine.url, second.url]
    with WeightPusher(
        urls, engine.url, checkpoint=checkpoint, directory=tmp_path, timeout_s=1
    ) as pusher:
        with pytest.raises(EngineLostError, match=f"engine {second.url}: .*does not answer"):
            pusher.push(1, weights(1.0))
        over.set()
    assert second.calls.count(LOAD_STAGED) == 1
    assert serves(engine) == (0.5, 0)
    [hold] = engine.sent("/api/push/hold")
    assert hold["ttl_s"] == 120 + 1


def test_one_engine_is_lost_while_all_are_checked_and_nobody_serves_the_new_version(
    engine: SleepingEngine, second: SleepingEngine, both: WeightPusher
) -> None:
    both.push(1, weights(1.0))

    def verify() -> None:
        second.refuse = gone_at(PAUSE)
        raise RuntimeError("no answer to a probe")

    with pytest.raises(EngineLostError, match=f"engine {second.url}: .*no answer to a probe"):
        both.push(2, weights(2.0), verify)
    assert serves(engine) == (1.0, 1)
    assert engine.calls[-2:] == ["/resume", "/api/push/release"]


def test_one_engine_is_lost_as_all_go_on_and_nobody_serves_the_new_version(
    engine: SleepingEngine, second: SleepingEngine, both: WeightPusher
) -> None:
    both.push(1, weights(1.0))
    second.refuse = gone_at("/resume")
    with pytest.raises(EngineLostError, match=f"engine {second.url}: .*does not answer /resume"):
        both.push(2, weights(2.0))
    assert serves(engine) == (1.0, 1)
    assert engine.calls[-2:] == ["/resume", "/api/push/release"]


def test_an_engine_that_takes_no_weights_at_all_does_not_stop_the_others(
    engine: SleepingEngine, second: SleepingEngine, both: WeightPusher
) -> None:
    second.refuse = lambda number, path: path == LOAD_STAGED
    with pytest.raises(EngineLostError, match=f"restart it: engine {second.url}: .*not today"):
        both.push(1, weights(1.0))
    assert serves(engine) == (0.5, 0)
    assert engine.calls[-2:] == ["/resume", "/api/push/release"]


def gone_at(call: str) -> Callable[[int, str], bool]:
    def gone(number: int, path: str) -> bool:
        if path == call:
            raise ConnectionError("the engine ends")
        return False

    return gone


def serves(engine: SleepingEngine) -> tuple[float, int]:
    """The weights that were loaded last, and the version that the proxy was told last."""
    return engine.loaded[-1], engine.sent("/api/push/version")[-1]["version"]


# An earlier version is returned to


def fetching(folder_of: dict[int, float]) -> Callable[[Path], ServedWeights]:
    """As kept weights: the files of a version, put into a folder."""

    def fetch(target: Path) -> ServedWeights:
        version = int(target.name)
        target.mkdir()
        save_file({"w": torch.tensor([folder_of[version]])}, target / "0.safetensors")
        return ServedWeights(version, (str(target / "0.safetensors"),))

    return fetch


def test_an_earlier_version_is_served_under_its_own_number(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    pusher.push(2, weights(2.0))
    seconds = pusher.roll_back(1, fetching({1: 1.0}))
    assert engine.state.weight == 1.0
    assert (engine.state.version, engine.state.says) == (1, "1")
    assert not engine.state.held
    assert not engine.state.paused
    assert set(seconds) >= {"hold", "pause", "load", "set_version", "resume", "release"}
    drains = [body["drain_s"] for body in engine.bodies if "drain_s" in body]
    assert drains == [2.0, 2.0, 0.0]  # calls in flight are not waited for


def test_what_was_written_meanwhile_is_refused(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    """A rollback from another thread, while the trainer's writes the next version."""
    pusher.push(1, weights(1.0))
    pusher.push(2, weights(2.0))

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        pusher.roll_back(1, fetching({1: 1.0}))
        yield from weights(3.0)

    new = pusher.write(3, gathered())
    assert [Path(path).exists() for path in new.paths] == [True]
    with pytest.raises(SupersededError, match="version 3 is not pushed: version 1 was returned"):
        pusher.serve(new)
    assert [Path(path).exists() for path in new.paths] == [False]
    assert engine.state.weight == 1.0
    assert pusher.version == 1
    # An engine that is started again gets what was returned to.
    engine.start_again()
    assert pusher.restore()
    assert engine.state.weight == 1.0


def test_a_version_that_is_served_already_is_only_held_to(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    before = len(engine.calls)
    assert pusher.roll_back(1, fetching({})) == {}
    assert len(engine.calls) == before
    with pytest.raises(SupersededError):
        pusher.push(2, weights(2.0))


def test_a_rollback_that_the_engine_refuses_changes_nothing(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    pusher.push(2, weights(2.0))
    before = len(engine.calls)
    engine.refuse = lambda number, path: number == before + 5
    with pytest.raises(PushError, match="version 2 still is"):
        pusher.roll_back(1, fetching({1: 1.0}))
    engine.refuse = lambda number, path: False
    assert engine.state.weight == 2.0
    pusher.push(3, weights(3.0))
    assert engine.state.weight == 3.0
    assert [body["drain_s"] for body in engine.sent("/api/push/hold")] == [2.0, 2.0, 0.0, 2.0]
