"""Engines that others started: what each must have been started with, before anything is pushed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tracegrad_trainer.config.vllm import VllmSettings
from tracegrad_trainer.inference.engine_config import check_engines, missing_options

OURS = VllmSettings(model="some/model", max_model_len=4096)
ADAPTERS = OURS.model_copy(update={"adapter": Path("/run/adapter"), "adapter_rank": 12})


def config(**model: Any) -> dict[str, Any]:
    """vLLM's own, of an engine that was started as it should be."""
    given = {
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "max_model_len": 4096,
        "served_model_name": "policy",
    }
    return {
        "weight_transfer_config": {"backend": "tracegrad_shm"},
        "model_config": given | model,
        "lora_config": None,
    }


def test_nothing_is_missing_of_one_that_was_started_as_ours() -> None:
    assert missing_options(config(), OURS) == []
    assert missing_options(config(served_model_name=["other", "policy"]), OURS) == []
    lengths = {"override_generation_config": {"max_new_tokens": 99}}
    assert missing_options(config(**lengths), OURS) == []


@pytest.mark.parametrize(
    ("model", "needed"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"generation_config": "auto"}, "--generation-config vllm"),
        ({"override_generation_config": {"top_k": 20}}, "--override-generation-config '{}'"),
        ({"max_model_len": 2048}, "--max-model-len 4096"),
        ({"served_model_name": "other"}, "--served-model-name policy"),
    ],
)
def test_what_calls_or_training_need_is_named(model: dict[str, Any], needed: str) -> None:
    assert missing_options(config(**model), OURS) == [needed]


def test_an_engine_that_takes_no_pushes_of_ours_is_told_how() -> None:
    plain = config() | {"weight_transfer_config": None}
    [needed] = missing_options(plain, OURS)
    assert needed == """--weight-transfer-config '{"backend": "tracegrad_shm"}'"""
    small = config(served_model_name="policy-base") | {
        "weight_transfer_config": {"backend": "tracegrad_adapter"},
        "lora_config": {"max_lora_rank": 8},
    }
    assert missing_options(small, ADAPTERS) == ["--enable-lora --max-lora-rank 16"]
    assert missing_options(small | {"lora_config": {"max_lora_rank": 16}}, ADAPTERS) == []
    assert len(missing_options(config(), ADAPTERS)) == 3


class Engine(HTTPServer):
    said: Any = None


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        said = self.server.said  # type: ignore[attr-defined]
        self.send_response(404 if said is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_each_is_asked_and_the_one_at_fault_named(engine: Engine) -> None:
    url = f"http://127.0.0.1:{engine.server_port}"
    check_engines((url,), OURS)  # says nothing: the first push will tell
    engine.said = {"vllm_config": config()}
    check_engines((url,), OURS)
    engine.said = {"vllm_config": config(generation_config="auto")}
    with pytest.raises(ValueError, match=f"push.engines: {url}: start it with --generation-con"):
        check_engines((url,), OURS)
    engine.said = {"other": 1}
    with pytest.raises(ValueError, match=f"push.engines: {url}/server_info does not answer"):
        check_engines((url,), OURS)
