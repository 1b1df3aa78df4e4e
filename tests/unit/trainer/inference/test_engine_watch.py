"""An engine or a proxy that was started again between two pushes serves what was served."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import save_file

from support.system.log_lines import our_lines
from support.trainer.sleeping_engine import MODEL_FOLDER, SleepingEngine
from tracegrad_trainer.inference.control_routes import EngineLostError, PushError
from tracegrad_trainer.inference.engine_watch import EngineWatch
from tracegrad_trainer.inference.weight_push import WeightPusher


@pytest.fixture
def engine() -> Iterator[SleepingEngine]:
    engine = SleepingEngine()
    engine.weights |= {1: 1.0, 2: 2.0}
    yield engine
    engine.close()
    assert engine.wrong == []


@pytest.fixture
def pusher(engine: SleepingEngine, tmp_path: Path) -> Iterator[WeightPusher]:
    folder, shared = tmp_path / "checkpoint", tmp_path / "shm"
    folder.mkdir()
    shared.mkdir()
    save_file({"w": torch.tensor([MODEL_FOLDER])}, folder / "model.safetensors")
    with WeightPusher(
        engine.url, engine.url, version=-1, checkpoint=folder, directory=shared
    ) as pusher:
        yield pusher
    assert list(shared.iterdir()) == []


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.tensor([value]))]


def test_what_is_as_it_was_is_left_alone(engine: SleepingEngine, pusher: WeightPusher) -> None:
    assert not pusher.restore(), "nothing was pushed yet"
    assert engine.calls == []
    pusher.push(1, weights(1.0))
    engine.calls.clear()
    assert not pusher.restore()
    assert engine.calls == ["/weight_info", "/api/push"]


def test_an_engine_that_was_started_again_gets_what_is_served(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    engine.start_again()
    assert pusher.restore()
    assert (engine.loaded, engine.state.says) == ([1.0, 1.0], "1")
    assert engine.serves
    assert not pusher.restore()
    pusher.push(2, weights(2.0))
    assert engine.state.weight == 2.0


@pytest.mark.parametrize("known", [1, 2])
def test_a_proxy_that_was_started_again_gets_its_version_and_opens(
    engine: SleepingEngine, pusher: WeightPusher, known: int
) -> None:
    """`known`: 1 where it was killed before the push was in the store."""
    pusher.push(1, weights(1.0))
    pusher.push(2, weights(2.0))
    engine.start_proxy_again(version=known)
    assert pusher.restore()
    assert (engine.state.version, engine.serves) == (2, True)
    assert engine.loaded == [1.0, 2.0], "the engine says that it has it"


def test_an_engine_and_a_proxy_that_were_started_again_get_everything(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    engine.start_again()
    engine.start_proxy_again(version=0)
    assert pusher.restore()
    assert (engine.loaded, engine.state.says) == ([1.0, 1.0], "1")
    assert (engine.state.version, engine.serves) == (1, True)


def test_files_that_are_written_meanwhile_are_left_for_the_next_push(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    new = pusher.write(2, weights(2.0))
    engine.start_again()
    assert pusher.restore()
    report = pusher.serve(new)
    assert engine.loaded == [1.0, 1.0, 2.0]
    assert "write" in report.seconds


def test_an_engine_that_stands_still_is_left_alone(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    pusher.stop_engine()
    engine.calls.clear()
    assert not pusher.restore()
    assert engine.calls == []
    pusher.wake_engine()


def test_the_word_of_an_engine_that_always_says_the_same_means_nothing(
    engine: SleepingEngine, pusher: WeightPusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "weight_info", lambda *_: {"weight_version": "default"})
    pusher.push(1, weights(1.0))
    assert [pusher.restore() for _ in range(3)] == [True, False, False]
    assert engine.loaded == [1.0, 1.0]
    engine.start_proxy_again(version=0)
    assert [pusher.restore() for _ in range(2)] == [True, False]
    assert engine.loaded == [1.0, 1.0, 1.0], "nobody knows what it has"
    assert (engine.state.version, engine.serves) == (1, True)


def test_one_that_does_not_answer_is_waited_for(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    engine.refuse = lambda number, path: True
    assert not pusher.restore()


def test_a_proxy_that_says_nothing_of_use_is_left_alone(
    engine: SleepingEngine, pusher: WeightPusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.push(1, weights(1.0))
    monkeypatch.setattr(engine, "api_push", lambda *_: {})
    assert not pusher.restore()


def test_a_restore_that_failed_half_way_is_made_again_whatever_the_engine_says(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    engine.start_again()
    engine.refuse = lambda number, path: path == "/finish_weight_update"
    with pytest.raises(EngineLostError):
        pusher.restore()
    engine.refuse = lambda number, path: False
    engine.state.says = "1"  # of an update that was never finished
    assert pusher.restore()
    assert (engine.state.weight, engine.serves) == (1.0, True)


def test_a_push_that_left_no_weights_is_mended_whatever_the_engine_says(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    engine.refuse = lambda number, path: path == "/finish_weight_update"
    with pytest.raises(EngineLostError):
        pusher.push(2, weights(2.0))
    engine.refuse = lambda number, path: False
    assert engine.state.says == "1"
    assert pusher.restore()
    assert (engine.state.weight, engine.serves) == (1.0, True)
    assert not pusher.restore()


def test_a_push_gives_what_a_restore_that_failed_did_not(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    pusher.push(1, weights(1.0))
    engine.start_again()
    engine.refuse = lambda number, path: path == "/finish_weight_update"
    with pytest.raises(EngineLostError):
        pusher.restore()
    engine.refuse = lambda number, path: False
    pusher.push(2, weights(2.0))
    assert not pusher.restore()
    assert (engine.state.weight, engine.serves) == (2.0, True)


def test_the_watch_looks_again_and_says_once_what_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = Event()
    outcomes: list[bool | PushError] = [
        False, PushError("no room"), PushError("no room"), True, PushError("no room"), False
    ]  # fmt: skip

    class Restorable:
        version = 7

        def restore(self) -> bool:
            if not outcomes:
                done.set()
                return False
            outcome = outcomes.pop(0)
            if isinstance(outcome, PushError):
                raise outcome
            return outcome

    with caplog.at_level(logging.WARNING), EngineWatch(Restorable(), every_s=0.001):
        assert done.wait(60)
    assert our_lines(caplog) == [
        "version 7 is not served yet: no room",
        "vLLM or the proxy was started again: version 7 is served as before",
        "version 7 is not served yet: no room",
    ]
