"""What `trainer export` writes is served by vLLM with the trainer's own log-probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from support.engines.vllm_server import tiny_settings
from support.trainer.kill_runs import log_of, step_runs
from support.trainer.prepared_run import fill, settings_of
from support.trainer.tiny_model import load_model, reference_logprobs, save_tiny_model
from tracegrad_trainer.cli.export import ExportRequest, export
from tracegrad_trainer.inference.logprob_probe import compare_logprobs, sample_probe
from tracegrad_trainer.inference.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
GAP = 1e-4  # nats; the two engines agree to about 1e-6
PROMPT = [5 + 7 * i % 290 for i in range(24)]


def test_vllm_serves_what_was_exported(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    settings = settings_of(model, tmp_path / "state")
    settings.state_dir.mkdir()
    fill(settings.proxy.store, groups=4)
    file = tmp_path / "settings.json"
    file.write_text(settings.model_dump_json())
    with step_runs() as runs:
        assert runs.run(file) == [0], log_of(file)
    out = tmp_path / "exported"
    assert export(settings, ExportRequest(out=out, dtype="float32"), Console(quiet=True)) == 0

    served = tiny_settings(out, tmp_path / "vllm.log").model_copy(update={"max_model_len": 128})
    with VllmProcess(served) as engine:
        engine.wait_healthy(timeout=240)
        sample = sample_probe(engine.url, PROMPT, tokens=24, model=served.served_model_name)
    trained = reference_logprobs(load_model(out), PROMPT, sample.token_ids)
    compare_logprobs(sample.logprobs, trained, GAP)
    before = reference_logprobs(load_model(model), PROMPT, sample.token_ids)
    assert max(abs(a - b) for a, b in zip(sample.logprobs, before, strict=True)) > 100 * GAP
