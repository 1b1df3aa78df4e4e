"""One forward over a packed micro-batch: log-probabilities of its targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracegrad_trainer.batches import MicroBatch

from . import attention


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """A micro-batch as tensors on the rank's device."""

    batch: MicroBatch
    model: dict[str, Any]  # keyword arguments of the model's forward
    labels: Tensor  # i64[n]
    temperature: Tensor  # f32[n]
    mu: Tensor  # f32[n]
    advantage: Tensor  # f32[n]
    version: Tensor  # i64[n]
    turn: Tensor  # i64[n]


def to_inputs(batch: MicroBatch, model: nn.Module, device: torch.device) -> Inputs:
    def move(values: Any) -> Tensor:
        return torch.from_numpy(values).to(device)

    arguments: dict[str, Any] = {
        "input_ids": move(batch.input_ids),
        "position_ids": move(batch.position_ids),
        "use_cache": False,
        # Logits only where a target's predecessor stands.
        "logits_to_keep": move(batch.target - 1),
    }
    config: Any = model.config
    if config._attn_implementation == attention.NAME:
        arguments["packed_rows"] = attention.PackedRows(batch.row_lengths.tolist(), device)
    return Inputs(
        batch=batch,
        model=arguments,
        labels=move(batch.input_ids[0, batch.target]),
        temperature=move(batch.temperature),
        mu=move(batch.mu),
        advantage=move(batch.advantage),
        version=move(batch.version),
        turn=move(batch.turn),
    )


def logprobs(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """log pi f32[n] of the targets at their temperatures, with gradient; entropy f32[n] without.

    Raises:
        ValueError: the model ignores `logits_to_keep`.
    """
    logits: Tensor = model(**inputs.model).logits[0]
    if logits.shape[0] != len(inputs.labels):
        raise ValueError(f"{type(model).__name__} does not support logits_to_keep")
    logits = logits.float()
    if (inputs.batch.temperature != 1).any():
        logits = logits / inputs.temperature[:, None]
    log_z = torch.logsumexp(logits, -1)
    chosen = logits.gather(-1, inputs.labels[:, None])[:, 0] - log_z
    with torch.no_grad():
        share = torch.exp(logits - log_z[:, None])
        entropy = log_z - (share * logits).sum(-1)
    return chosen, entropy
