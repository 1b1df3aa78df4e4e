"""A candidate that is a LoRA adapter with a name of its own, on the one engine: what both names
have, and the version that each one's calls are recorded with, whatever fails on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.trainer.sleeping_engine import MODEL_FOLDER, SleepingEngine
from tracegrad_trainer.inference.canary_push import CanaryAdapter, CanaryEngine
from tracegrad_trainer.inference.control_routes import PushError, ServedWeights
from tracegrad_trainer.inference.engine_sleep import SleepSettings
from tracegrad_trainer.inference.weight_push import WeightPusher

NAME = "policy-candidate"
PAUSE, LOAD = "/pause keep true", "/update_weights"


@pytest.fixture
def engine() -> Iterator[SleepingEngine]:
    engine = SleepingEngine()
    engine.weights |= {n: float(n) for n in range(1, 9)}
    yield engine
    engine.close()
    assert engine.wrong == []


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"w": torch.tensor([MODEL_FOLDER])}, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def pusher(engine: SleepingEngine, checkpoint: Path, tmp_path: Path) -> Iterator[WeightPusher]:
    """Version 1 is served."""
    with WeightPusher(
        engine.url,
        engine.url,
        checkpoint=checkpoint,
        directory=tmp_path,
        adapter={"r": 4},
        canary=CanaryAdapter(NAME, 0.1),
    ) as pusher:
        pusher.push(1, weights(1.0))
        yield pusher


@pytest.fixture
def with_candidate(engine: SleepingEngine, pusher: WeightPusher) -> WeightPusher:
    pusher.serve(pusher.write(2, weights(2.0)), as_candidate=True)
    return pusher


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.tensor([value]))]


def fetch(target: Path) -> ServedWeights:
    version = int(target.name)
    target.mkdir(exist_ok=True)
    save_file({"w": torch.tensor([float(version)])}, target / "adapter_model.safetensors")
    return ServedWeights(version, (str(target / "adapter_model.safetensors"),))


def stands(engine: SleepingEngine) -> tuple[tuple[float | None, int], tuple[float | None, int]]:
    """What the name of all calls has, and the candidate's, and their versions at the proxy."""
    assert engine.serves
    state = engine.state
    return (state.weight, state.version), (state.candidate, state.candidate_version)


def test_a_candidate_is_beside_what_is_promoted_until_it_is_promoted(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    assert stands(engine) == ((1.0, 1), (1.0, 1)), "calls may have either name"
    tried: list[tuple[str, ...]] = []
    report = pusher.serve(
        pusher.write(2, weights(2.0)), lambda *places: tried.append(places), as_candidate=True
    )
    assert (report.carried, report.turns, tried) == ("adapter", 1, [(NAME,)])
    assert stands(engine) == ((1.0, 1), (2.0, 2))
    assert engine.canary == {"model": NAME, "share": 0.1}
    assert engine.state.says == "1+2"
    assert (pusher.version, pusher.newest.version) == (1, 2)
    assert not pusher.restore()
    assert pusher.promote_candidate(2)["pause"] > 0
    assert stands(engine) == ((2.0, 2), (2.0, 2))
    assert (engine.canary, engine.state.says) == (None, "2")
    pusher.serve(pusher.write(3, weights(3.0)), as_candidate=True)
    assert stands(engine) == ((2.0, 2), (3.0, 3))


def test_one_that_regressed_is_taken_back(
    engine: SleepingEngine, with_candidate: WeightPusher
) -> None:
    with_candidate.roll_back(1, fetch)
    assert stands(engine) == ((1.0, 1), (1.0, 1))
    assert engine.canary is None
    assert not with_candidate.restore()


def test_a_rollback_to_an_earlier_version_is_one_of_both_names(
    engine: SleepingEngine, with_candidate: WeightPusher
) -> None:
    with_candidate.promote_candidate(2)
    with_candidate.serve(with_candidate.write(3, weights(3.0)), as_candidate=True)
    with_candidate.roll_back(1, fetch)
    assert stands(engine) == ((1.0, 1), (1.0, 1))
    assert engine.canary is None


@pytest.mark.parametrize("call", [PAUSE, LOAD, "/finish_weight_update", "/api/push/version"])
def test_a_candidate_that_fails_leaves_what_was_there(
    engine: SleepingEngine, with_candidate: WeightPusher, call: str
) -> None:
    engine.refuse_once(call)
    with pytest.raises(PushError):
        with_candidate.serve(with_candidate.write(3, weights(3.0)), as_candidate=True)
    assert stands(engine) == ((1.0, 1), (2.0, 2))
    assert with_candidate.newest.version == 2
    assert not with_candidate.restore()


def test_a_first_candidate_that_fails_leaves_no_canary(
    engine: SleepingEngine, pusher: WeightPusher
) -> None:
    engine.refuse_once("/finish_weight_update")
    with pytest.raises(PushError, match="version 1 still is"):
        pusher.serve(pusher.write(2, weights(2.0)), as_candidate=True)
    assert stands(engine) == ((1.0, 1), (1.0, 1))
    assert engine.canary is None


@pytest.mark.parametrize("call", [PAUSE, LOAD, "/finish_weight_update", "/api/push/version"])
def test_a_promotion_that_fails_leaves_a_candidate(
    engine: SleepingEngine, with_candidate: WeightPusher, call: str
) -> None:
    """Both names have what is promoted then, until the next look gives the candidate back."""
    engine.refuse_once(call)
    with pytest.raises(PushError):
        with_candidate.promote_candidate(2)
    assert with_candidate.restore() == (call != PAUSE)
    assert stands(engine) == ((1.0, 1), (2.0, 2))
    with_candidate.promote_candidate(2)
    assert stands(engine) == ((2.0, 2), (2.0, 2))


def test_an_engine_that_was_started_again_gets_both(
    engine: SleepingEngine, with_candidate: WeightPusher
) -> None:
    engine.start_again()
    assert with_candidate.restore()
    assert stands(engine) == ((1.0, 1), (2.0, 2))
    assert not with_candidate.restore()


def test_a_proxy_that_was_started_again_is_told_of_both(
    engine: SleepingEngine, with_candidate: WeightPusher
) -> None:
    engine.start_proxy_again(version=2)
    engine.canary, engine.state.candidate_version = None, 2
    engine.state.paused = True  # nothing is computed for a proxy that holds calls
    assert with_candidate.restore()
    engine.state.paused = False
    assert stands(engine) == ((1.0, 1), (2.0, 2))
    assert engine.canary == {"model": NAME, "share": 0.1}


def test_a_name_is_of_adapters_on_one_engine_that_is_awake(
    checkpoint: Path, tmp_path: Path
) -> None:
    url, canary = "http://127.0.0.1:1", CanaryAdapter(NAME, 0.1)
    with pytest.raises(ValueError, match="canary: only adapters have a name"):
        WeightPusher(url, checkpoint=checkpoint, canary=canary)
    sleep = SleepSettings(1, tmp_path)
    with pytest.raises(ValueError, match="on an engine that is awake"):
        WeightPusher(url, checkpoint=checkpoint, adapter={"r": 4}, sleep=sleep, canary=canary)
    with pytest.raises(ValueError, match="there are several"):
        WeightPusher([url, f"{url}2"], checkpoint=checkpoint, adapter={"r": 4}, canary=canary)
    with pytest.raises(ValueError, match="canary: one of several engines"):
        WeightPusher(url, checkpoint=checkpoint, canary=CanaryEngine(url, 0.1))
