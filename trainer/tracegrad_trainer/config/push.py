"""Settings of the weight push, and of the check of what is served after it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tracegrad_trainer.config.push_transport import Transport
from tracegrad_trainer.config.vllm import engine_base_urls


class PushSettings(BaseModel):
    """The weight push and the check of what is served after it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    drain_s: float = Field(
        2, ge=0, description="wait for calls in flight before weights change under them"
    )
    folder: Path | None = Field(
        None,
        description="where weights go as files, two versions of them, in the dtype that is served;"
        " vLLM must see it too, where push.transport is files; default: /dev/shm if they have"
        " room there, else TMPDIR or /tmp",
    )
    transport: Literal["auto"] | Transport = Field(
        "auto",
        description="how weights reach vLLM: as files that it sees (push.folder); broadcast by"
        " torch.distributed, over TCP (gloo) or from GPU to GPU (nccl); in GPU memory that rank 0"
        " shares with vLLM on this machine (ipc); or from each rank's shards to vLLM's by NCCL"
        " (nccl_m2n); auto: by where both are, and never nccl_m2n",
    )
    kv_cache: Literal["recompute", "keep"] = Field(
        "recompute",
        description="of requests that run while weights change: recompute: what the old weights"
        " computed is computed again with the new ones; keep: they go on with it, at once",
    )
    lora: Literal["auto", "adapter", "merged"] = Field(
        "auto",
        description="with fsdp.lora: push the adapter alone, which vLLM serves beside the model, or"
        " the model's weights with it merged in; auto: the adapter where vLLM can serve it",
    )
    engines: tuple[str, ...] = Field(
        (),
        description="base URLs of further vLLM servers of this model, started by other hands with"
        " the arguments of ours: calls are spread over all, and a push goes to all or none",
    )
    proxies: tuple[str, ...] = Field(
        (),
        description="base URL of each of several proxies that are behind one address (proxy_url):"
        " calls wait at all of them while weights change; one that is gone is left out",
    )
    rollout: Literal["all", "rolling"] = Field(
        "all",
        description="of several engines: all: calls wait until all have the new weights; rolling:"
        " one engine after the other is given them, while the others take the calls, and each call"
        " has the version of its engine",
    )
    timeout_s: float = Field(
        300, gt=0, description="vLLM, or the proxy, has failed that takes longer for one request"
    )
    probe_tokens: int = Field(
        32, ge=1, description="sampled after each of eight prompts, to compare log-probabilities"
    )
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="largest log-probability gap of a token, nats, of a good push; default: bounds"
        " on median, 99 % quantile and mean by the coarser dtype of trainer and engine",
    )
    failures_in_a_row: int = Field(3, ge=1, description="failed pushes before the trainer ends")

    @field_validator("engines", "proxies")
    @classmethod
    def _are_base_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return engine_base_urls(urls)
