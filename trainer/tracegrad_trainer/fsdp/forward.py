"""One forward over a packed micro-batch: log-probabilities of its targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracegrad_trainer.batches import MicroBatch
from tracegrad_trainer.objectives import Tokens

from . import attention

# What of a micro-batch an objective sees as it is.
_TO_TOKENS = (
    *("mu", "advantage", "score", "version", "expert", "turn", "row", "rollout", "group"),
    *("turn_tokens", "rollout_tokens", "pair", "label"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """A micro-batch as tensors on the rank's device."""

    batch: MicroBatch
    model: dict[str, Any]  # keyword arguments of the model's forward
    labels: Tensor  # i64[n]
    temperature: Tensor  # f32[n]
    tensors: dict[str, Tensor]  # fields of `Tokens`, [n] or [rows]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Before:
    """What is known of a micro-batch's targets before its forward with gradient; f32[n] each."""

    old: Tensor | None = None  # None: the current ones, which they are at a batch's first step
    reference: Tensor | None = None
    old_value: Tensor | None = None
    returns: Tensor | None = None
    advantage: Tensor | None = None  # where it depends on values: instead of the batch's own
    kto_z: Tensor | None = None  # scalar


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Forward:
    logp: Tensor  # f32[n], with gradient
    entropy: Tensor  # f32[n], without
    value: Tensor | None = None  # f32[n], with gradient


def to_inputs(batch: MicroBatch, model: nn.Module, device: torch.device) -> Inputs:
    def move(values: Any) -> Tensor:
        return torch.from_numpy(values).to(device)

    arguments: dict[str, Any] = {
        "input_ids": move(batch.input_ids),
        "position_ids": move(batch.position_ids),
        "use_cache": False,
        # Logits only where a target is predicted from.
        "logits_to_keep": move(batch.source),
    }
    config: Any = model.config
    if config._attn_implementation == attention.NAME:
        arguments["packed_rows"] = attention.PackedRows(batch.row_lengths.tolist(), device)
    return Inputs(
        batch=batch,
        model=arguments,
        labels=move(batch.input_ids[0, batch.target]),
        temperature=move(batch.temperature),
        tensors={name: move(getattr(batch, name)) for name in _TO_TOKENS},
    )


def tokens_of(inputs: Inputs, now: Forward, before: Before) -> Tokens:
    given = inputs.tensors
    if before.advantage is not None:
        given = given | {"advantage": before.advantage}
    batch = inputs.batch
    return Tokens(
        logp=now.logp,
        old=now.logp.detach() if before.old is None else before.old,
        turns=batch.turns,
        rows=len(batch.row_lengths),
        rollouts=batch.rollouts,
        groups=batch.groups,
        reference=before.reference,
        value=now.value,
        old_value=before.old_value,
        returns=before.returns,
        kto_z=before.kto_z,
        **given,
    )


def forward(model: nn.Module, inputs: Inputs) -> Forward:
    """The targets' log-probabilities at their temperatures.

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
    return Forward(logp=chosen, entropy=entropy)
