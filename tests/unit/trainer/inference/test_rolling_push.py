"""Engines that change one after the other, and one that serves a candidate: what each has, and
what the proxy says of it, whatever fails on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.proxy.proxy_with_engine import served_proxy
from support.proxy.servers import CONTROL, CONTROL_KEY
from support.trainer.sleeping_engine import MODEL_FOLDER, SleepingEngine
from tracegrad.store import GroupCommitWriter, Store
from tracegrad_trainer.inference.canary_push import CanaryEngine
from tracegrad_trainer.inference.control_routes import EngineLostError, PushError, ServedWeights
from tracegrad_trainer.inference.weight_push import PAUSED_STAGES, WeightPusher

PAUSE, LOAD_STAGED = "/pause keep true", "/finish_weight_update"
Fleet = list[SleepingEngine]


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Two engines; the first one's port is also the proxy's."""
    engines = [SleepingEngine(), SleepingEngine()]
    for engine in engines:
        engine.weights |= {n: float(n) for n in range(1, 9)}
    engines[0].fleet = {engine.url: engine for engine in engines}
    engines[0].all_may_be_held = False
    yield engines
    for engine in engines:
        engine.close()
    assert [engine.wrong for engine in engines] == [[], []]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"w": torch.tensor([MODEL_FOLDER])}, folder / "model.safetensors")
    return folder


@pytest.fixture
def rolling(fleet: Fleet, checkpoint: Path, tmp_path: Path) -> Iterator[WeightPusher]:
    with WeightPusher(
        [engine.url for engine in fleet],
        fleet[0].url,
        checkpoint=checkpoint,
        directory=tmp_path,
        rolling=True,
    ) as pusher:
        yield pusher


@pytest.fixture
def canary(fleet: Fleet, checkpoint: Path, tmp_path: Path) -> Iterator[WeightPusher]:
    with WeightPusher(
        [engine.url for engine in fleet],
        fleet[0].url,
        checkpoint=checkpoint,
        directory=tmp_path,
        canary=CanaryEngine(fleet[1].url, 0.1),
    ) as pusher:
        yield pusher


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.tensor([value]))]


def stands(fleet: Fleet) -> list[tuple[float | None, int]]:
    """What each engine has, and the version that its calls are recorded with; all take calls."""
    assert all(engine.serves for engine in fleet)
    return [(engine.state.weight, engine.state.version) for engine in fleet]


def fetching(values: dict[int, float]) -> Callable[[Path], ServedWeights]:
    def fetch(target: Path) -> ServedWeights:
        version = int(target.name)
        target.mkdir(exist_ok=True)
        save_file({"w": torch.tensor([values[version]])}, target / "0.safetensors")
        return ServedWeights(version, (str(target / "0.safetensors"),))

    return fetch


def gone_at(call: str) -> Callable[[int, str], bool]:
    def gone(number: int, path: str) -> bool:
        if path == call:
            raise ConnectionError("the engine ends")
        return False

    return gone


def test_one_engine_after_the_other_stands_still(fleet: Fleet, rolling: WeightPusher) -> None:
    between: list[list[tuple[float | None, int]]] = []

    def verify(url: str) -> None:
        between.append([(each.state.weight, each.state.version) for each in fleet])

    report = rolling.push(1, weights(1.0), verify)
    assert between == [[(1.0, 1), (MODEL_FOLDER, 0)], [(1.0, 1), (1.0, 1)]]
    assert stands(fleet) == [(1.0, 1), (1.0, 1)]
    holds = fleet[0].sent("/api/push/hold")
    assert [body["upstream"] for body in holds] == [each.url for each in fleet]
    assert report.turns == 2
    assert report.paused_s == sum(report.seconds[stage] for stage in PAUSED_STAGES) / 2
    held = ("hold", *PAUSED_STAGES, "release")
    assert report.held_s == pytest.approx(sum(report.seconds[stage] for stage in held) / 2)
    rolling.push(2, weights(2.0))
    assert stands(fleet) == [(2.0, 2), (2.0, 2)]


@pytest.mark.parametrize("call", [PAUSE, LOAD_STAGED, "/resume"])
@pytest.mark.parametrize("which", [0, 1])
def test_what_one_engine_refuses_is_taken_back_from_those_before_it(
    fleet: Fleet, rolling: WeightPusher, which: int, call: str
) -> None:
    rolling.push(1, weights(1.0))
    fleet[which].refuse_once(call)
    with pytest.raises(PushError):
        rolling.push(2, weights(2.0))
    if call != "/resume":  # one that does not go on is lost, and is to be started again
        assert stands(fleet) == [(1.0, 1), (1.0, 1)]
    else:
        assert fleet[1 - which].state.weight == 1.0
        fleet[which].start_again()
        assert rolling.restore()
        assert stands(fleet) == [(1.0, 1), (1.0, 1)]
    assert rolling.version == 1
    rolling.push(3, weights(3.0))
    assert stands(fleet) == [(3.0, 3), (3.0, 3)]


@pytest.mark.parametrize("which", [0, 1])
def test_an_engine_that_serves_wrongly_and_those_before_it_go_back(
    fleet: Fleet, rolling: WeightPusher, which: int
) -> None:
    rolling.push(1, weights(1.0))

    def verify(url: str) -> None:
        if url == fleet[which].url:
            raise ArithmeticError("off by 3 nats")

    with pytest.raises(PushError, match="version 2 was served wrongly, version 1 is back"):
        rolling.push(2, weights(2.0), verify)
    assert stands(fleet) == [(1.0, 1), (1.0, 1)]


@pytest.mark.parametrize("known", [0, 4])
def test_a_first_push_that_is_wrong_leaves_the_weights_of_the_model_folder(
    fleet: Fleet, checkpoint: Path, tmp_path: Path, known: int
) -> None:
    """`known`: what the proxy calls them, for an earlier run may have served version 4. Calls go
    on: they are other people's too."""
    urls = [engine.url for engine in fleet]
    for engine in fleet:
        engine.state.version, engine.weights[known] = known, MODEL_FOLDER

    def wrong() -> None:
        raise ArithmeticError("off by 3 nats")

    with WeightPusher(
        urls, urls[0], version=-1, checkpoint=checkpoint, directory=tmp_path
    ) as pusher:
        fleet[0].all_may_be_held = True
        back = r"wrongly, version 0 \(the model's folder\) is back"
        with pytest.raises(PushError, match=back) as caught:
            pusher.push(5, weights(5.0), wrong)
        assert not isinstance(caught.value, EngineLostError)
        assert stands(fleet) == [(MODEL_FOLDER, 0)] * 2
        fleet[1].refuse_once(LOAD_STAGED)
        with pytest.raises(PushError, match=r"version 0 \(the model's folder\) still is"):
            pusher.push(6, weights(6.0))
        assert stands(fleet) == [(MODEL_FOLDER, 0)] * 2
        pusher.push(7, weights(7.0))
        assert stands(fleet) == [(7.0, 7)] * 2


def test_a_first_push_that_is_wrong_leaves_what_an_earlier_run_had_served(
    fleet: Fleet, checkpoint: Path, tmp_path: Path
) -> None:
    urls = [engine.url for engine in fleet]
    fetched: list[Path] = []

    def fetch(folder: Path) -> ServedWeights | None:
        fetched.append(folder)
        folder.mkdir()
        save_file({"w": torch.tensor([4.0])}, folder / "model-00001.safetensors")
        return ServedWeights(4, (str(folder / "model-00001.safetensors"),))

    def wrong() -> None:
        raise ArithmeticError("off by 3 nats")

    with WeightPusher(
        urls, urls[0], version=-1, checkpoint=checkpoint, directory=tmp_path
    ) as pusher:
        pusher.return_to_earlier_run(fetch)
        fleet[0].all_may_be_held = True
        with pytest.raises(PushError, match="wrongly, version 4 is back"):
            pusher.push(5, weights(5.0), wrong)
        assert stands(fleet) == [(4.0, 4)] * 2
        assert not fetched[0].exists(), "its files go with those of the push"
        fleet[1].refuse_once(LOAD_STAGED)
        with pytest.raises(PushError, match="version 4 still is"):
            pusher.push(5, weights(5.0))
        assert stands(fleet) == [(4.0, 4)] * 2

        pusher.return_to_earlier_run(lambda folder: None)
        with pytest.raises(PushError, match=r"version 0 \(the model's folder\) is back"):
            pusher.push(6, weights(6.0), wrong)
        assert stands(fleet) == [(MODEL_FOLDER, 0)] * 2
        pusher.return_to_earlier_run(fetch)
        pusher.push(7, weights(7.0))
        with pytest.raises(PushError, match="version 7 is back"):
            pusher.push(8, weights(8.0), wrong)
        assert len(fetched) == 2, "from a first push on nobody goes back that far"


def test_a_proxy_that_refuses_the_last_word_takes_all_back(
    fleet: Fleet, rolling: WeightPusher
) -> None:
    rolling.push(1, weights(1.0))
    said: list[str] = []

    def refuse(number: int, path: str) -> bool:
        said.extend([path] if path == "/api/push/version" else [])
        return path == "/api/push/version" and len(said) == 3

    fleet[0].refuse = refuse
    with pytest.raises(PushError, match="the proxy refused /api/push/version"):
        rolling.push(2, weights(2.0))
    assert stands(fleet) == [(1.0, 1), (1.0, 1)]


@pytest.mark.parametrize("call", [PAUSE, LOAD_STAGED])
def test_where_the_second_engine_is_lost_the_first_goes_back(
    fleet: Fleet, rolling: WeightPusher, call: str
) -> None:
    rolling.push(1, weights(1.0))
    fleet[1].refuse = gone_at(call)
    with pytest.raises(EngineLostError, match="does not answer"):
        rolling.push(2, weights(2.0))
    assert (fleet[0].state.weight, fleet[0].state.version) == (1.0, 1)
    assert fleet[0].serves
    fleet[1].refuse = lambda number, path: False
    fleet[1].start_again()
    assert rolling.restore()
    assert stands(fleet) == [(1.0, 1), (1.0, 1)]


def test_an_engine_that_does_not_go_back_is_said_to_be_lost(
    fleet: Fleet, rolling: WeightPusher
) -> None:
    rolling.push(1, weights(1.0))

    def verify(url: str) -> None:
        if url == fleet[1].url:
            fleet[0].refuse = gone_at(PAUSE)
            raise ArithmeticError("off by 3 nats")

    with pytest.raises(EngineLostError, match=f"engine {fleet[0].url} does not go back to version"):
        rolling.push(2, weights(2.0), verify)
    assert (fleet[1].state.weight, fleet[1].state.version) == (1.0, 1)


def test_a_rollback_is_served_by_all_at_once(fleet: Fleet, rolling: WeightPusher) -> None:
    rolling.push(1, weights(1.0))
    rolling.push(2, weights(2.0))
    fleet[0].all_may_be_held = True
    rolling.roll_back(1, fetching({1: 1.0}))
    assert stands(fleet) == [(1.0, 1), (1.0, 1)]
    assert "upstream" not in fleet[0].sent("/api/push/hold")[-1]


def test_an_engine_that_was_started_again_gets_the_weights_while_the_other_serves(
    fleet: Fleet, rolling: WeightPusher
) -> None:
    rolling.push(1, weights(1.0))
    assert not rolling.restore()
    fleet[1].start_again()
    before = len(fleet[0].sent("/api/push/hold"))
    assert rolling.restore()
    assert stands(fleet) == [(1.0, 1), (1.0, 1)]
    assert [body["upstream"] for body in fleet[0].sent("/api/push/hold")[before:]] == [fleet[1].url]
    assert PAUSE not in fleet[0].calls[-8:], "the other one went on"
    assert not rolling.restore()


def test_the_word_of_engines_that_always_say_the_same_means_nothing(
    fleet: Fleet, rolling: WeightPusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in fleet:
        monkeypatch.setattr(engine, "weight_info", lambda *_: {"weight_version": "default"})
    rolling.push(1, weights(1.0))
    assert [rolling.restore() for _ in range(3)] == [True, False, False]
    assert stands(fleet) == [(1.0, 1), (1.0, 1)]


def test_a_candidate_is_served_by_one_engine_until_it_is_promoted(
    fleet: Fleet, canary: WeightPusher
) -> None:
    roll_first(fleet, canary)
    canary.serve(canary.write(2, weights(2.0)), as_candidate=True)
    assert stands(fleet) == [(1.0, 1), (2.0, 2)]
    assert fleet[0].canary == {"upstream": fleet[1].url, "share": 0.1}
    assert (canary.version, canary.newest.version) == (1, 2)
    assert all(Path(path).exists() for path in canary.newest.paths)
    assert not canary.restore()
    seconds = canary.promote_candidate(2)
    assert seconds["pause"] > 0
    assert stands(fleet) == [(2.0, 2), (2.0, 2)]
    assert fleet[0].canary is None
    assert canary.version == canary.newest.version == 2
    canary.serve(canary.write(3, weights(3.0)), as_candidate=True)
    assert stands(fleet) == [(2.0, 2), (3.0, 3)]


def test_files_that_are_written_while_a_candidate_is_promoted_are_left_for_the_next_push(
    fleet: Fleet, with_candidate: WeightPusher
) -> None:
    new = with_candidate.write(3, weights(3.0))
    assert "write" not in with_candidate.promote_candidate(2)
    assert "write" in with_candidate.serve(new, as_candidate=True).seconds
    assert stands(fleet) == [(2.0, 2), (3.0, 3)]


def test_a_candidates_number_is_taken(with_candidate: WeightPusher) -> None:
    for version in (1, 2):
        with pytest.raises(ValueError, match=f"version: {version} is served already"):
            with_candidate.write(version, weights(3.0))


def roll_first(fleet: Fleet, pusher: WeightPusher) -> None:
    """A push to all at once, for which the proxy holds all."""
    fleet[0].all_may_be_held = True
    pusher.push(1, weights(1.0))
    fleet[0].all_may_be_held = False


@pytest.fixture
def with_candidate(fleet: Fleet, canary: WeightPusher) -> WeightPusher:
    roll_first(fleet, canary)
    canary.serve(canary.write(2, weights(2.0)), as_candidate=True)
    return canary


def test_a_candidate_that_regressed_goes_and_the_others_never_stood_still(
    fleet: Fleet, with_candidate: WeightPusher
) -> None:
    before = fleet[0].calls.count(PAUSE)
    with_candidate.roll_back(1, fetching({}))
    assert stands(fleet) == [(1.0, 1), (1.0, 1)]
    assert fleet[0].canary is None
    assert fleet[0].calls.count(PAUSE) == before


def test_the_next_candidate_takes_the_place_of_the_last_one(
    fleet: Fleet, with_candidate: WeightPusher
) -> None:
    with_candidate.serve(with_candidate.write(3, weights(3.0)), as_candidate=True)
    assert stands(fleet) == [(1.0, 1), (3.0, 3)]

    def verify(url: str) -> None:
        assert url == fleet[1].url
        raise ArithmeticError("off by 3 nats")

    with pytest.raises(PushError, match="version 3 is back"):
        with_candidate.serve(with_candidate.write(4, weights(4.0)), verify, as_candidate=True)
    assert stands(fleet) == [(1.0, 1), (3.0, 3)]
    assert with_candidate.newest.version == 3


@pytest.mark.parametrize("which", [0, 1])
def test_each_engine_that_was_started_again_gets_its_own_weights(
    fleet: Fleet, with_candidate: WeightPusher, which: int
) -> None:
    fleet[which].start_again()
    assert with_candidate.restore()
    assert stands(fleet) == [(1.0, 1), (2.0, 2)]
    assert not with_candidate.restore()


@pytest.mark.parametrize(("which", "ends_with"), [(0, 2), (1, 1)])
def test_an_engine_that_was_lost_is_asked_again_when_a_candidate_ends(
    fleet: Fleet, with_candidate: WeightPusher, which: int, ends_with: int
) -> None:
    fleet[which].start_again()
    fleet[which].refuse = lambda number, path: path == LOAD_STAGED
    with pytest.raises(EngineLostError):
        with_candidate.restore()
    fleet[which].refuse = lambda number, path: False
    if ends_with == 2:
        with_candidate.promote_candidate(2)
    else:
        with_candidate.roll_back(1, fetching({}))
    assert stands(fleet) == [(float(ends_with), ends_with)] * 2


def test_a_proxy_that_was_started_again_is_told_of_both(
    fleet: Fleet, with_candidate: WeightPusher
) -> None:
    fleet[0].canary = None
    for engine in fleet:
        engine.state.version, engine.state.held = 2, True  # what the store has as served
    fleet[0].wrong.clear()
    for engine in fleet:
        engine.state.paused = True  # nothing is computed for a proxy that holds calls
    assert with_candidate.restore()
    for engine in fleet:
        engine.state.paused = False
    assert stands(fleet) == [(1.0, 1), (2.0, 2)]
    assert fleet[0].canary == {"upstream": fleet[1].url, "share": 0.1}


def test_a_promotion_that_an_engine_refuses_leaves_a_candidate(
    fleet: Fleet, with_candidate: WeightPusher
) -> None:
    fleet[0].refuse_once(LOAD_STAGED)
    with pytest.raises(PushError, match="version 1 still is"):
        with_candidate.promote_candidate(2)
    assert stands(fleet) == [(1.0, 1), (2.0, 2)]
    assert (with_candidate.version, with_candidate.newest.version) == (1, 2)
    assert with_candidate.promote_candidate(1) == {}, "another number is none"
    with_candidate.promote_candidate(2)
    assert stands(fleet) == [(2.0, 2), (2.0, 2)]


def test_a_first_candidate_that_fails_leaves_no_canary(fleet: Fleet, canary: WeightPusher) -> None:
    roll_first(fleet, canary)
    fleet[1].refuse_once(LOAD_STAGED)
    with pytest.raises(PushError, match="version 1 still is"):
        canary.serve(canary.write(2, weights(2.0)), as_candidate=True)
    assert stands(fleet) == [(1.0, 1), (1.0, 1)]
    assert fleet[0].canary is None
    assert not canary.restore()


def test_a_base_is_pushed_to_all_engines_unless_it_is_served_already(
    fleet: Fleet, canary: WeightPusher
) -> None:
    roll_first(fleet, canary)
    fleet[0].all_may_be_held = True
    canary.serve_base(2, fetching({2: 2.0}))
    assert stands(fleet) == [(2.0, 2), (2.0, 2)]
    before = len(fleet[0].calls)
    canary.serve_base(2, fetching({2: 2.0}))
    assert len(fleet[0].calls) == before
    assert canary.version == 2


def test_a_canary_that_one_of_the_proxies_refuses_is_ended_at_all(
    fleet: Fleet, canary: WeightPusher
) -> None:
    roll_first(fleet, canary)
    fleet[0].refuse_once("/api/push/canary")
    with pytest.raises(PushError, match="refused /api/push/canary"):
        canary.serve(canary.write(2, weights(2.0)), as_candidate=True)
    assert [body["share"] for body in fleet[0].sent("/api/push/canary")] == [0.1, 0]
    assert stands(fleet) == [(1.0, 1), (1.0, 1)]
    assert not canary.restore()


def test_a_first_push_ends_the_canary_of_a_run_that_was_killed(
    fleet: Fleet, checkpoint: Path, tmp_path: Path
) -> None:
    fleet[0].canary = {"upstream": fleet[1].url, "share": 0.1}
    fleet[0].all_may_be_held = True
    urls = [engine.url for engine in fleet]
    with WeightPusher(
        urls, urls[0], version=-1, checkpoint=checkpoint, directory=tmp_path
    ) as pusher:
        pusher.push(1, weights(1.0))
    assert stands(fleet) == [(1.0, 1), (1.0, 1)]
    assert fleet[0].canary is None


def test_a_canary_needs_an_engine_beside_it(fleet: Fleet, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="canary: one of several engines"):
        WeightPusher(fleet[0].url, checkpoint=checkpoint, canary=CanaryEngine(fleet[0].url, 0.1))


def test_the_proxy_itself_is_told_of_one_engine_after_the_other(
    fleet: Fleet, checkpoint: Path, tmp_path: Path
) -> None:
    """Its own routes, and URLs that name the engines as it does."""
    urls = [engine.url for engine in fleet]
    database = f"sqlite:///{tmp_path}/store.db"
    said: list[dict[str, Any]] = []
    with (
        Store.open(database) as store,
        GroupCommitWriter(store) as writer,
        served_proxy(
            store, writer, upstream=",".join(urls), control_key=CONTROL_KEY, held=True
        ) as http,
        WeightPusher(
            urls,
            str(http.base_url).rstrip("/"),
            proxy_key=CONTROL_KEY,
            version=-1,
            checkpoint=checkpoint,
            directory=tmp_path,
            rolling=True,
            canary=CanaryEngine(urls[1], 0.25),
        ) as pusher,
    ):

        def state() -> dict[str, Any]:
            return dict(http.get("/api/push/upstreams", headers=CONTROL).json())

        for engine in fleet:
            engine.weights = {engine.state.version: None}  # its own proxy is not asked
            engine.check = lambda call: None  # type: ignore[method-assign]
        pusher.push(1, weights(1.0), lambda: said.append(state()))
        assert said.pop()["held"] is True, "nobody's calls come before a first push"
        assert state() == {"version": 1, "held": False, "in_flight": 0, "waiting": 0}
        pusher.push(2, weights(2.0), lambda url: said.append(state()))
        assert [one["upstreams"] for one in said] == [
            {urls[0]: {"version": 2, "held": False}},
            {url: {"version": 2, "held": False} for url in urls},
        ], "nobody waits for a check"
        assert {one["version"] for one in said} == {1}
        assert state() == {"version": 2, "held": False, "in_flight": 0, "waiting": 0}
        assert not pusher.restore()
        report = pusher.serve(pusher.write(3, weights(3.0)), as_candidate=True)
        assert report.turns == 1
        assert state()["upstreams"] == {urls[1]: {"version": 3, "held": False}}
        assert state()["canary"] == {"upstream": urls[1], "share": 0.25}
        assert not pusher.restore()
        pusher.promote_candidate(3)
        assert state() == {"version": 3, "held": False, "in_flight": 0, "waiting": 0}
