"""`trainer serve` with two engines that others started: rolling pushes, then a canary, while agents
work. Each token is held against the weights of the version that it is recorded with. And with one
engine of its own, that serves a candidate as a second adapter."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from safetensors.torch import load_file
from transformers import PreTrainedModel

from support.agents.group_load import GroupLoad, missing_calls
from support.engines.vllm_server import tiny_settings
from support.trainer.char_model import save_char_model
from support.trainer.tiny_model import load_model, reference_logprobs
from support.trainer.trainer_serve import TrainerServe, trainer_serve
from tracegrad.events import Turn
from tracegrad.proxy.engine.weight_gate import Canary
from tracegrad.store import Decision, Store
from tracegrad.store.read.versions import VersionHistory
from tracegrad_trainer.inference.control_routes import CandidateControl, VllmControl
from tracegrad_trainer.inference.logprob_probe import compare_logprobs
from tracegrad_trainer.inference.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

GAP = 1e-4  # nats
SHARE = 0.5
GATED: dict[str, object] = {"promotion.gate": "canary", "promotion.canary_share": SHARE}
SLOW_S = 240.0  # for what takes seconds on an idle machine
Pair = tuple[str | None, str | None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_char_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of two, started side by side, without the trainer."""
    with ExitStack() as stack:
        processes = []
        for name in ("first", "second"):
            folder = tmp_path_factory.mktemp(name)
            log = folder / "vllm.log"
            settings = tiny_settings(model, log, max_model_len=512, cache_mib=64)
            processes.append(stack.enter_context(VllmProcess(settings)))
        for process in processes:
            process.wait_healthy(timeout=SLOW_S)
        yield [process.url for process in processes]


def of_engines(urls: list[str]) -> Callable[[], Pair]:
    """Asks both what they serve."""
    first, second = (VllmControl(url, SLOW_S) for url in urls)
    return lambda: (first.weight_version_soon(), second.weight_version_soon())


def of_names(url: str) -> Callable[[], Pair]:
    """Asks one what its two adapters are."""
    promoted, candidate = VllmControl(url, SLOW_S), CandidateControl(url, SLOW_S)

    def look() -> Pair:
        said = promoted.weight_version_soon()
        return said, candidate.weight_version_soon() or said

    return look


class WeightWatch:
    """What is said of what is promoted and of the candidate, whenever that changes."""

    def __init__(self, look: Callable[[], Pair]) -> None:
        self._ask = look
        self.pairs: list[Pair] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.02):
            found = self._ask()
            if self.pairs[-1:] != [found]:
                self.pairs.append(found)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()


def history(run: TrainerServe) -> VersionHistory:
    with Store.open(run.store_url, create=False) as store:
        return store.version_history()


def awaited(run: TrainerServe, load: GroupLoad, what: Callable[[], object]) -> None:
    """Until `what`, while agents work. AssertionError: a call of theirs failed."""
    run.wait(lambda: load.failure is not None or what(), SLOW_S)
    assert load.failures == []


def by_side(*, candidates: float) -> Callable[[str, float], float]:
    """Rewards that say nothing but which side a rollout was on."""
    return lambda rollout_id, _: candidates if is_candidates(rollout_id) else 1.0 - candidates


def is_candidates(rollout_id: str) -> bool:
    return Canary("", SHARE).has(rollout_id)


@pytest.mark.slow  # a minute; test_candidate_adapter has a real engine's candidates in CI
def test_two_engines_roll_and_try_candidates_while_agents_work(
    engines: list[str], model: Path, tmp_path: Path
) -> None:
    settings: dict[str, object] = {
        "model": model,
        "vllm.urls": ",".join(engines),
        "ranks": 1,
        "optim.lr": 1e-2,  # steps that move the weights far enough to be told apart
        "push.rollout": "rolling",
        "promotion.keep": 1000,
    }
    ask = of_engines(engines)
    with trainer_serve(tmp_path / "state", settings) as run, WeightWatch(ask) as watch:
        run.wait_serving()
        loads = [rolled(run, watch)]
        stopped(run)
    settings |= GATED
    with trainer_serve(tmp_path / "state", settings) as run, WeightWatch(ask) as watch:
        run.wait_serving()
        loads += [tried(run, watch, better=True), tried(run, watch, better=False)]
        stopped(run)
    assert missing_calls(run.store_url, [load.toys for load in loads]) == []
    checked = check_tokens(run, model)
    assert sum(checked.values()) > 1000
    assert len(checked) > 4, "of many versions"


@pytest.mark.slow
def test_one_engine_tries_candidates_by_name_while_agents_work(model: Path, tmp_path: Path) -> None:
    settings = {"model": model, "ranks": 1, "optim.lr": 1e-2, "fsdp.lora.rank": 4, **GATED}
    with trainer_serve(tmp_path / "state", settings) as run:
        run.wait_serving()
        with WeightWatch(of_names(run.vllm_url)) as watch:
            loads = [tried(run, watch, better=True), tried(run, watch, better=False)]
        stopped(run)
    assert missing_calls(run.store_url, [load.toys for load in loads]) == []


def rolled(run: TrainerServe, watch: WeightWatch) -> GroupLoad:
    """Three steps, each pushed to the first engine, and then to the second."""
    with GroupLoad(run.url) as load:
        awaited(run, load, lambda: run.last_step() >= 3 and mixed_turns(run))
    for version in (1, 2, 3):
        assert (str(version), str(version - 1)) in watch.pairs, "one after the other"
        assert (str(version - 1), str(version)) not in watch.pairs
    return load


def mixed_turns(run: TrainerServe) -> int:
    """That were frozen on an engine, and went on there with its new weights."""
    return sum(len(turn.policy_versions) > 1 for turn in turns(run))


def turns(run: TrainerServe) -> list[Turn]:
    with Store.open(run.store_url, create=False) as store:
        rows = store.rollouts(limit=None)
        return [turn for row in rows for turn in store.rollout_turns(row.rollout_id)]


def tried(run: TrainerServe, watch: WeightWatch, *, better: bool) -> GroupLoad:
    """A candidate that is `better` for its users, or worse, until the gate has decided."""
    run.wait(lambda: history(run).promoted is not None, SLOW_S)
    base = history(run).promoted
    load = GroupLoad(run.url)
    load.toys.reward_of = by_side(candidates=float(better))
    with load:
        awaited(run, load, lambda: verdict(run, base))
        awaited(run, load, lambda: watch.pairs[-1][0] == watch.pairs[-1][1])
    record = verdict(run, base)
    assert record is not None
    candidate, decision = record
    check_sides(run, base, candidate, decision.created_at)
    after = watch.pairs[watch.pairs.index((str(base), str(candidate))) + 1]
    if better:
        assert decision.kind == "promote"
        assert after == (str(candidate), str(candidate))
    else:
        assert (decision.kind, decision.version) == ("rollback", base)
        assert after == (str(base), str(base)), "the first one never stood still"
    return load


def verdict(run: TrainerServe, base: int | None) -> tuple[int, Decision] | None:
    """The first version after `base` that the gate has decided on, and what. Others may have been
    there before it, each replaced by the next one while it was undecided."""
    with Store.open(run.store_url, create=False) as store:
        records = store.version_history().records.values()
        evaluated = [one.version for one in records if one.version > (base or 0) and one.evaluation]
        decisions = [one for one in store.decisions() if one.by == "gate:canary" and one.acted_at]
    for candidate in evaluated:
        for decision in decisions:
            if decision.kind == "promote" and decision.version == candidate:
                return candidate, decision
            if decision.kind == "rollback" and f"version {candidate} " in decision.reason:
                return candidate, decision
    return None


def check_sides(run: TrainerServe, base: int | None, candidate: int, until: float) -> None:
    """Of rollouts that began and ended while both were served: each has its side's version."""
    with Store.open(run.store_url, create=False) as store:
        # Until then an engine that is given the candidate takes no calls, and the other does.
        events = store.version_events(candidate)
        since = next(event.created_at for event in events if event.state == "serving")
        rows = [
            row
            for row in store.rollouts(limit=None)
            if row.opened_at > since and row.finished_at is not None and row.finished_at < until
        ]
        versions = {
            row.rollout_id: {
                version
                for turn in store.rollout_turns(row.rollout_id)
                for version, _ in turn.policy_versions
            }
            for row in rows
        }
    sides = Counter(is_candidates(rollout_id) for rollout_id in versions)
    assert min(sides[True], sides[False]) >= 1, sides
    for rollout_id, found in versions.items():
        assert found == {candidate if is_candidates(rollout_id) else base}


def check_tokens(run: TrainerServe, folder: Path) -> Counter[int]:
    """How many tokens of each version have the log-probabilities of its weights, by transformers'
    own forward."""
    checked: Counter[int] = Counter()
    known = history(run)
    models: dict[int, PreTrainedModel] = {}
    for turn in turns(run):
        assert turn.untrainable is None
        begin = 0
        for version, count in turn.policy_versions:
            end = begin + count
            if version not in models:
                models[version] = weights_of(run, known, folder, version)
            ids = turn.prompt_token_ids, turn.completion_token_ids
            expected = reference_logprobs(models[version], *ids)
            compare_logprobs(list(turn.completion_logprobs)[begin:end], expected[begin:end], GAP)
            checked[version] += count
            begin = end
    return checked


def weights_of(
    run: TrainerServe, known: VersionHistory, folder: Path, version: int
) -> PreTrainedModel:
    """As they are on disk, under any number that they had."""
    [kept, *_] = [one for one in known.numbers_of(version) if known.records[one].kept]
    model = load_model(folder)
    for file in (run.state_dir / "versions" / f"version-{kept:08d}").glob("*.safetensors"):
        unknown = model.load_state_dict(load_file(file), strict=False).unexpected_keys
        assert unknown == []
    return model


def stopped(run: TrainerServe) -> None:
    run.signal(signal.SIGTERM)
    ended = run.ended(SLOW_S)
    ended.is_clean()
    assert ended.code == 0, ended.output
