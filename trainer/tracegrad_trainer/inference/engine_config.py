"""What engines that others started (`vllm.urls`, `push.engines`) must have been started with, asked
of each before anything is pushed. vLLM 0.32 tells its configuration where its routes for pushes
are."""

from __future__ import annotations

from typing import Any

import httpx

from tracegrad.chat.sampling_params import DEFAULTS
from tracegrad_trainer.config.vllm import VllmSettings
from tracegrad_trainer.utils.network import http_client

_TIMEOUT_S = 30.0


def check_engines(urls: tuple[str, ...], ours: VllmSettings, field: str = "push.engines") -> None:
    """`field`: the setting that names them.

    Raises ValueError: one of them takes no pushes of ours, or what it samples could not be trained
    on; names it, and the option that it needs."""
    for url in urls:
        try:
            config = _config_of(url)
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error
        if needed := None if config is None else missing_options(config, ours):
            raise ValueError(f"{field}: {url}: start it with {', '.join(needed)}")


def missing_options(config: dict[str, Any], ours: VllmSettings) -> list[str]:
    """Of `vllm serve`, as it should have been started. `config`: vLLM's own, as JSON."""
    needed = []
    transfer = config.get("weight_transfer_config") or {}
    if transfer.get("backend") != ours.transfer_backend:
        needed.append(f'--weight-transfer-config \'{{"backend": "{ours.transfer_backend}"}}\'')
    model = config.get("model_config") or {}
    # The log-probabilities of what was sampled from; and no sampling defaults of the checkpoint's.
    wanted = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
    for option, value in wanted.items():
        if model.get(option) != value:
            needed.append(f"--{option.replace('_', '-')} {value}")
    # They apply whatever `generation_config` says.
    if DEFAULTS.keys() & (model.get("override_generation_config") or {}).keys():
        needed.append("--override-generation-config '{}'")
    name, served = ours.base_model_name, model.get("served_model_name")
    if served is not None and name not in ([served] if isinstance(served, str) else served):
        needed.append(f"--served-model-name {name}")
    longest = model.get("max_model_len")
    if ours.max_model_len is not None and longest is not None and longest < ours.max_model_len:
        needed.append(f"--max-model-len {ours.max_model_len}")
    if ours.adapter is not None:
        rank = (config.get("lora_config") or {}).get("max_lora_rank") or 0
        if rank < ours.adapter_rank:
            needed.append(f"--enable-lora --max-lora-rank {ours.largest_adapter_rank}")
    return needed


def _config_of(url: str) -> dict[str, Any] | None:
    """None: it does not say, and the first push shows what it takes."""
    try:
        with http_client(url, timeout_s=_TIMEOUT_S) as client:
            answer = client.get("/server_info", params={"config_format": "json"})
            if answer.status_code in (404, 405, 501):
                return None
            answer.raise_for_status()
            config = answer.json()["vllm_config"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise ValueError(f"{url}/server_info does not answer: {error}") from error
    return config if isinstance(config, dict) else None
