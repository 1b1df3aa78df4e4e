"""Steps whose weights are pushed to a real vLLM: a mixture of experts, and adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from transformers import PreTrainedModel

from support.engines.vllm_server import VllmServer, tiny_settings
from support.trainer.kill_runs import Runs, log_of, step_runs
from support.trainer.prepared_run import fill, settings_of, steps_of
from support.trainer.pushing_ranks import GAP, PROMPT, PushingRanks, pushing_ranks
from support.trainer.tiny_model import load_model, perturb, reference_logprobs, save_tiny_model
from tracegrad.store import Store
from tracegrad_trainer.cli.export import ExportRequest, export, load_checkpoint_model
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import as_hf_tensors, list_checkpoints
from tracegrad_trainer.inference.logprob_probe import compare_logprobs, sample_probe
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.inference.weight_push import WeightPusher

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with step_runs() as found:
        yield found


@dataclass(frozen=True)
class Mixture:
    """The folder of a mixture of experts, and what one step made of it, exported in pieces."""

    model: Path
    settings: TrainerSettings
    exported: Path


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, runs: Runs) -> Mixture:
    folder = tmp_path_factory.mktemp("mixture")
    model = save_tiny_model(folder / "model", moe=True)
    settings = settings_of(model, folder / "state")
    settings.state_dir.mkdir()
    fill(settings.proxy.store, groups=2)
    file = folder / "settings.json"
    file.write_text(settings.model_dump_json())
    assert runs.run(file) == [0], log_of(file)
    out = folder / "exported"
    request = ExportRequest(out=out, dtype="float32", shard_size="500KB")
    assert export(settings, request, Console(quiet=True)) == 0
    assert len(list(out.glob("*.safetensors"))) > 2
    return Mixture(model, settings, out)


@pytest.fixture(scope="module")
def engine(mixture: Mixture, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    """It serves what was exported."""
    settings = tiny_settings(mixture.exported, tmp_path_factory.mktemp("vllm") / "vllm.log")
    with VllmProcess(settings) as process:
        process.wait_healthy(timeout=240)
        yield process


def moved(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_an_exported_mixture_is_what_was_trained_wherever_it_is_loaded(
    mixture: Mixture, engine: VllmProcess
) -> None:
    sample = sample_probe(engine.url, PROMPT, tokens=24)
    [folder] = list_checkpoints(mixture.settings.checkpoints)
    trained = load_checkpoint_model(mixture.settings, folder)
    assert isinstance(trained, PreTrainedModel)
    expected = reference_logprobs(trained, PROMPT, sample.token_ids)
    loaded = reference_logprobs(load_model(mixture.exported), PROMPT, sample.token_ids)
    compare_logprobs(loaded, expected, GAP)
    compare_logprobs(sample.logprobs, expected, GAP)
    untrained = reference_logprobs(load_model(mixture.model), PROMPT, sample.token_ids)
    assert moved(sample.logprobs, untrained) > 100 * GAP


def test_each_push_of_a_mixture_is_what_is_served(mixture: Mixture, engine: VllmProcess) -> None:
    model = load_model(mixture.exported)
    with WeightPusher(engine.url, checkpoint=mixture.exported) as pusher:
        for version in (1, 2):
            perturb(model, seed=version)
            pusher.push(version, as_hf_tensors(model, model.named_parameters()))
            sample = sample_probe(engine.url, PROMPT, tokens=24)
            compare_logprobs(
                sample.logprobs, reference_logprobs(model, PROMPT, sample.token_ids), GAP
            )


def proven(pushing: PushingRanks, *, steps: int) -> None:
    """Each version was compared with the trainer's log-probabilities, and the last is served."""
    with Store.open(pushing.store_url, create=False) as store:
        versions = store.versions()
    assert [version.version for version in versions] == list(range(steps + 1))
    for version in versions:
        assert version.state == "serving", version.detail
        assert version.detail["gap"]["tokens"] > 0
        assert version.detail["gap"]["max"] < GAP
    made = steps_of(pushing.store_url)
    assert [step.step for step in made] == list(range(1, steps + 1))
    assert all(step.metrics["turns_trained"] > 0 for step in made)
    pushing.agree()


def test_two_ranks_push_the_steps_of_a_mixture(
    mixture: Mixture, engine: VllmProcess, runs: Runs, tmp_path: Path
) -> None:
    """With experts replayed within the step, which the probe must know nothing of, and with vLLM
    asleep while they work (of its CPU build the scheduler alone)."""
    changes = {"ranks": 2, "fsdp__routing": "r2", "gpus__share": "true"}
    with pushing_ranks(runs, engine, mixture.model, tmp_path / "state", **changes) as pushing:
        fill(pushing.store_url, groups=8)
        assert pushing.run(until=2)
        proven(pushing, steps=2)
        with Store.open(pushing.store_url, create=False) as store:
            stages = [set(version.detail["seconds"]) for version in store.versions()]
        assert all({"sleep", "wake_weights", "wake_cache"} <= found for found in stages)
        sample = sample_probe(engine.url, PROMPT, tokens=24)
    untrained = reference_logprobs(load_model(mixture.model), PROMPT, sample.token_ids)
    assert moved(sample.logprobs, untrained) > 100 * GAP


def test_a_mixture_with_adapters_is_pushed_merged(
    mixture: Mixture, engine: VllmProcess, runs: Runs, tmp_path: Path
) -> None:
    changes = {"fsdp__lora": '{"rank": 4, "alpha": 32}'}
    with pushing_ranks(runs, engine, mixture.model, tmp_path / "state", **changes) as pushing:
        fill(pushing.store_url, groups=8)
        assert pushing.run(until=2)
        proven(pushing, steps=2)


def test_adapters_are_pushed_merged_and_never_twice(
    vllm_server: VllmServer, runs: Runs, tmp_path: Path
) -> None:
    model = vllm_server.model_dir
    changes = {"fsdp__lora": '{"rank": 4, "alpha": 32}', "push__lora": "merged"}
    try:
        with pushing_ranks(
            runs, vllm_server.process, model, tmp_path / "state", **changes
        ) as pushing:
            fill(pushing.store_url, groups=8)
            assert pushing.run(until=2)
            proven(pushing, steps=2)
            assert pushing.run(until=3)  # a new start, of adapters that were trained
            pushing.agree()
            served = sample_probe(vllm_server.url, PROMPT, tokens=24)
            base = load_model(model)
            untrained = reference_logprobs(base, PROMPT, served.token_ids)
            assert moved(served.logprobs, untrained) > 100 * GAP
            out = tmp_path / "merged"
            request = ExportRequest(out=out, dtype="float32", merged=True)
            assert export(pushing.settings, request, Console(quiet=True)) == 0
        merged = reference_logprobs(load_model(out), PROMPT, served.token_ids)
        compare_logprobs(served.logprobs, merged, GAP)
    finally:
        with WeightPusher(vllm_server.url, checkpoint=model) as pusher:
            pusher.push(-1, load_model(model).named_parameters())


def test_adapters_alone_are_pushed_to_an_engine_that_serves_them(
    tiny_model_dir: Path, runs: Runs, tmp_path: Path
) -> None:
    changes = {"fsdp__lora": '{"rank": 4, "alpha": 32}'}
    state = tmp_path / "state"
    serving = tiny_settings(tiny_model_dir, tmp_path / "vllm.log").model_copy(
        update={"adapter": state / "run" / "adapter", "adapter_rank": 4}
    )
    state.mkdir(mode=0o700)
    with VllmProcess(serving) as engine:
        engine.wait_healthy(timeout=240)
        with pushing_ranks(runs, engine, tiny_model_dir, state, **changes) as pushing:
            assert pushing.settings.vllm.adapter == serving.adapter
            fill(pushing.store_url, groups=8)
            assert pushing.run(until=2)
            proven(pushing, steps=2)
            assert pushing.run(until=3)  # a new start, of adapters that were trained
            pushing.agree()
