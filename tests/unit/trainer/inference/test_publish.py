"""What rank 0 writes of the tensors that all ranks gather."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import SecretStr
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.trainer.step_samples import trainer_settings
from tracegrad_trainer.inference import publish, weight_files
from tracegrad_trainer.inference.canary_push import CanaryAdapter, CanaryEngine
from tracegrad_trainer.inference.control_routes import PushError, ServedWeights
from tracegrad_trainer.inference.live_weights import GatherOrder, LiveWeights
from tracegrad_trainer.inference.logprob_probe import ProbeMismatchError, ProbeSample
from tracegrad_trainer.inference.m2n_push import M2nOrder
from tracegrad_trainer.inference.publish import WeightPublisher
from tracegrad_trainer.inference.weight_push import WeightPusher
from tracegrad_trainer.losses.logprob_gap import BOUNDS, LogprobGap


class Gather:
    """A collective: every tensor of it must be asked for, whatever becomes of them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.asked = 0

    def __call__(self, model: object) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            self.asked += 1
            yield name, tensor


@pytest.fixture
def publisher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightPublisher]:
    monkeypatch.setattr(publish, "as_hf_tensors", lambda _, tensors: tensors)
    made = object.__new__(WeightPublisher)
    vllm = SimpleNamespace(weights_dtype="bfloat16", adapter=None)
    made.settings = SimpleNamespace(vllm=vllm)  # type: ignore[assignment]
    made.learner = SimpleNamespace(model=None)  # type: ignore[assignment]
    made.settings.model = tmp_path
    made._beside = []
    with WeightPusher("http://127.0.0.1:1", directory=tmp_path) as pusher:
        made.pusher = pusher
        yield made


@pytest.mark.parametrize("on_cpu", [True, False])
def test_only_a_vllm_on_a_cpu_is_asked_to_make_weights_ready(
    on_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def pusher(*_: object, **options: object) -> nullcontext[None]:
        given.update(options)
        return nullcontext()

    monkeypatch.setattr(publish, "is_rank_zero", lambda: True)
    monkeypatch.setattr(publish, "WeightPusher", pusher)
    monkeypatch.setattr(publish, "EngineWatch", lambda pusher: nullcontext())
    monkeypatch.setattr(WeightPublisher, "_pushed_bytes", lambda self: 0)
    settings = trainer_settings(tmp_path, vllm={"device": "cpu" if on_cpu else "cuda"})
    learner: Any = SimpleNamespace(precision=0.1, device=torch.device("cpu"), model=None)
    with ExitStack() as stack:
        WeightPublisher(settings, learner, stack)
    assert given["stages"] == on_cpu


def write(
    publisher: WeightPublisher, gather: Gather, monkeypatch: pytest.MonkeyPatch
) -> ServedWeights | PushError:
    monkeypatch.setattr(publish, "full_tensors", gather)
    return publisher._written(1, publisher._gathered())


def test_matrices_are_written_in_the_dtype_that_is_served(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "matrix": torch.tensor([[1.0, 1.001]]),
        "norm": torch.tensor([1.001]),
        "places": torch.tensor([[1, 2]]),
    }
    new = write(publisher, Gather(given), monkeypatch)
    assert isinstance(new, ServedWeights)
    [path] = new.paths
    found = load_file(path)
    assert torch.equal(found["matrix"], given["matrix"].bfloat16())
    assert torch.equal(found["norm"], given["norm"])
    assert torch.equal(found["places"], given["places"])


def test_what_is_served_and_not_trained_comes_along(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM takes no update that lacks a vision tower which it serves."""
    tower = {"visual.a": torch.randn(2, 2), "visual.b": torch.randn(3).bfloat16()}
    others = {"w": torch.zeros(2, 2), "mtp.x": torch.zeros(2)}
    save_file(tower | others, tmp_path / "model.safetensors")
    publisher._beside = list(tower)
    new = write(publisher, Gather({"w": torch.ones(2, 2)}), monkeypatch)
    assert isinstance(new, ServedWeights)
    found = load_file(new.paths[0])
    assert found.keys() == {"w", *tower}
    assert torch.equal(found["w"], torch.ones(2, 2).bfloat16())
    assert all(torch.equal(found[name], tensor) for name, tensor in tower.items())


def test_a_write_that_fails_leaves_nobody_waiting_in_a_gather(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = {"a": torch.tensor([[1.0, torch.nan]])}
    gather = Gather(broken | {str(number): torch.ones(2, 2) for number in range(5)})
    refused = write(publisher, gather, monkeypatch)
    assert isinstance(refused, PushError)
    assert "a holds values that are not finite" in str(refused)
    assert gather.asked == 6
    assert publisher.pusher is not None
    assert list(tmp_path.glob("*/1")) == []


def test_the_check_of_a_push_has_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def sample(url: str, prompts: object, **options: object) -> None:
        asked.update(options)
        raise TimeoutError

    monkeypatch.setattr(publish, "sample_probes", sample)
    made = object.__new__(WeightPublisher)
    push = SimpleNamespace(probe_tokens=4, timeout_s=7.0)
    vllm = SimpleNamespace(api_key=None, served_model_name="policy")
    made.settings = SimpleNamespace(  # type: ignore[assignment]
        vllm=vllm, push=push, engine_urls=["http://127.0.0.1:1"]
    )
    with pytest.raises(TimeoutError):
        publish._Probing(made, [[1]])()
    assert (asked["timeout"], asked["tokens"]) == (7.0, 4)


def test_the_last_engine_serves_candidates_or_the_one_does_by_a_name() -> None:
    vllm = SimpleNamespace(candidates=False, candidate_name="policy-candidate")
    promotion = SimpleNamespace(gate="canary", canary_share=0.1)
    urls = ["http://a", "http://b"]
    settings: Any = SimpleNamespace(vllm=vllm, promotion=promotion, engine_urls=urls)
    assert publish._canary(settings) == CanaryEngine("http://b", 0.1)
    vllm.candidates = True
    assert publish._canary(settings) == CanaryAdapter("policy-candidate", 0.1)
    promotion.gate = "held_out"
    assert publish._canary(settings) is None


def test_a_candidate_is_asked_by_its_name_and_as_its_calls_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def sample(url: str, prompts: object, **options: object) -> None:
        asked.append([url, *(options[name] for name in ("model", "key", "cache_salt"))])
        raise TimeoutError

    monkeypatch.setattr(publish, "sample_probes", sample)
    made = object.__new__(WeightPublisher)
    vllm = SimpleNamespace(api_key=SecretStr("secret"), served_model_name="policy")
    url = "http://127.0.0.1:1"
    made.settings = SimpleNamespace(  # type: ignore[assignment]
        vllm=vllm, push=SimpleNamespace(probe_tokens=4, timeout_s=7.0), engine_urls=[url]
    )
    for places in ((), ("policy-candidate",)):
        with pytest.raises(TimeoutError):
            publish._Probing(made, [[1]], "7")(*places)
    assert asked == [[url, "policy", "secret", "7"], [url, "policy-candidate", "secret", "7"]]


def test_each_engine_is_held_against_the_trainer_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is .2 nats off everywhere, twenty times what bfloat16 rounds, is within the bounds
    if it is measured together with two that are right."""
    off = {"http://a": 0.01, "http://b": 0.01, "http://c": 0.01}
    asked: list[str] = []

    def sample(url: str, prompts: object, **options: object) -> list[ProbeSample]:
        asked.append(url)
        return [ProbeSample([1], [2] * 32, [-1 - off[url]] * 32) for _ in range(8)]

    monkeypatch.setattr(publish, "sample_probes", sample)
    monkeypatch.setattr(publish, "_share", lambda samples: samples)
    made = object.__new__(WeightPublisher)
    push = SimpleNamespace(probe_tokens=32, timeout_s=7.0)
    vllm = SimpleNamespace(api_key=None, served_model_name="policy")
    made.settings = SimpleNamespace(  # type: ignore[assignment]
        vllm=vllm, push=push, engine_urls=list(off)
    )
    made.allowed = "bfloat16"
    monkeypatch.setattr(
        made,
        "trained_logprobs",
        lambda samples: [-1.0] * sum(len(one.logprobs) for one in samples),
        raising=False,
    )
    probing = publish._Probing(made, [[1]])
    probing()
    assert probing.gap is not None
    assert probing.gap.p50 == pytest.approx(0.01)
    probing("http://c")
    assert asked == ["http://a", "http://b", "http://c", "http://c"]
    off["http://b"] = 0.2
    gaps = [value for value in off.values() for _ in range(256)]
    assert LogprobGap.of(gaps).within(BOUNDS["bfloat16"])
    with pytest.raises(ProbeMismatchError, match=r"^engine http://b: .*differ"):
        probing()
    assert probing.gap.p50 == pytest.approx(0.2)


def test_a_bucket_of_tensors_is_in_memory_at_a_time(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of forty matrices of 4 KiB each, four fill a bucket."""
    monkeypatch.setattr(weight_files, "_SHARD_BYTES", 4 * 2048)
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def gather(model: object) -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for number in range(40):
            tensor = torch.full((32, 32), float(number), dtype=torch.bfloat16)
            alive.add(tensor)
            most = max(most, len(alive))
            yield str(number), tensor

    monkeypatch.setattr(publish, "full_tensors", gather)
    new = publisher._written(1, publisher._gathered())
    assert isinstance(new, ServedWeights)
    assert len(new.paths) == 10
    assert most <= 6


def test_other_ranks_take_part_as_often_as_rank_0_orders(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = Gather({"w": torch.zeros(2, 2), "norm": torch.zeros(2)})
    monkeypatch.setattr(publish, "full_tensors", gather)
    samples = [ProbeSample([1], [2], [-1.0])]
    orders = [GatherOrder(), M2nOrder("10.0.0.1", 1, 3), M2nOrder(), samples, GatherOrder()]
    told = iter([*orders, samples, None])  # engines that change in turn are proven in turn
    proven: list[object] = []
    monkeypatch.setattr(publisher, "trained_logprobs", proven.append, raising=False)
    monkeypatch.setattr(publish, "_share", lambda _: next(told))
    sent: list[M2nOrder] = []
    publisher._sender = SimpleNamespace(take_part=sent.append)  # type: ignore[assignment]
    publisher._follow()
    assert gather.asked == 4
    assert sent == [M2nOrder("10.0.0.1", 1, 3), M2nOrder()]
    assert proven == [samples, samples]
    assert next(told, "all") == "all"


def test_what_rank_0_does_not_send_is_gathered_all_the_same() -> None:
    """The others are in that collective."""
    gather = Gather({name: torch.zeros(1) for name in "abc"})
    ordered: list[GatherOrder] = []
    live = LiveWeights(ordered.append, lambda: gather(None), lambda gathered: gathered)
    with suppress(OSError), live.tensors() as tensors:
        next(tensors)
        raise OSError
    assert (len(ordered), gather.asked) == (1, 3)
