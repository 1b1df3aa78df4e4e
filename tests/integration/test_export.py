"""What `trainer export` writes is served by vLLM with the trainer's own log-probabilities, and its
LoRA loader reads the adapter folder."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import torch
from rich.console import Console

from support.trainer.kill_runs import log_of, step_runs
from support.trainer.prepared_run import fill, settings_of
from support.trainer.tiny_model import load_model, reference_logprobs, save_tiny_model
from tracegrad_trainer.cli.export import ExportRequest, export
from tracegrad_trainer.engine.config import FsdpSettings, LoraSettings
from tracegrad_trainer.engine.model.lora import adapter_tensors, save_adapter
from tracegrad_trainer.engine.model.parallelize import build_model
from tracegrad_trainer.inference.logprob_probe import compare_logprobs, sample_probe
from tracegrad_trainer.utils.network import find_free_port

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
GAP = 1e-4  # nats; the two engines agree to about 1e-6
PROMPT = [5 + 7 * i % 290 for i in range(24)]


@contextmanager
def documented_server(folder: Path) -> Iterator[str]:
    """The command of docs/training.md for CPUs, run beside the folder `exported`: its base URL."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    [line] = [each for each in page.splitlines() if each.startswith("python -m vllm.")]
    port = find_free_port()
    environment = os.environ | {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with (folder / "vllm.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *shlex.split(line)[1:], f"--port={port}"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_healthy(url):
            assert process.poll() is None, (folder / "vllm.log").read_text()[-4000:]
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


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

    with documented_server(tmp_path) as url:
        sample = sample_probe(url, PROMPT, tokens=24, model="exported")
    trained = reference_logprobs(load_model(out), PROMPT, sample.token_ids)
    compare_logprobs(sample.logprobs, trained, GAP)
    before = reference_logprobs(load_model(model), PROMPT, sample.token_ids)
    assert max(abs(a - b) for a, b in zip(sample.logprobs, before, strict=True)) > 100 * GAP


def test_vllm_reads_the_adapter_folder(tmp_path: Path) -> None:
    """By its own loader; no engine is started."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    settings = FsdpSettings(device="cpu", lora=LoraSettings(rank=3, alpha=7))
    model = build_model(save_tiny_model(tmp_path / "model"), settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # adapters alone, of which half are zero
                parameter.uniform_()
    folder = tmp_path / "adapter"
    save_adapter(model, folder)
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    helper = PEFTHelper.from_local_dir(str(folder), max_position_embeddings=256)
    read = LoRAModel.from_local_checkpoint(
        str(folder), names, helper, lora_model_id=1, device="cpu"
    )
    ours = dict(adapter_tensors(model))
    assert 2 * len(read.loras) == len(ours) > 0
    for name, theirs in read.loras.items():
        assert torch.equal(theirs.lora_a, ours[f"base_model.model.{name}.lora_A.weight"])
        assert theirs.scaling == 7 / 3
