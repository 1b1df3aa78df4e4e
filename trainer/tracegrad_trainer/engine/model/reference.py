"""The reference policy: a frozen second model, or the model itself without its adapters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.model import lora
from tracegrad_trainer.engine.model.forward import LmHead
from tracegrad_trainer.engine.model.lm_head import choose_lm_head
from tracegrad_trainer.engine.model.parallelize import build_sharded


@dataclass(frozen=True, slots=True, eq=False)
class ReferencePolicy:
    """Within `active()`, `model` gives the reference's log-probabilities."""

    model: nn.Module
    head: LmHead
    adapted: bool = False  # the policy's own model, its adapters put aside

    def active(self) -> AbstractContextManager[None]:
        return lora.without_adapters(self.model) if self.adapted else nullcontext()


def build_reference(folder: Path | str, mesh: DeviceMesh, settings: FsdpSettings) -> nn.Module:
    """Load and shard a frozen model over all ranks; laid out as the policy, without adapters.

    Raises:
        ValueError: there is no such model.
    """
    return build_sharded(folder, mesh, reference_layout(settings), frozen=True)


def reference_layout(settings: FsdpSettings) -> FsdpSettings:
    """The policy's, less what is only of what is trained."""
    return settings.model_copy(
        update={
            "lora": None,
            "gradient_checkpointing": False,
            "activation_offloading": False,
            "reshard": True,
            "routing": "own",
        }
    )


def reference_of(
    policy: nn.Module, head: LmHead, given: nn.Module | None, device: torch.device
) -> ReferencePolicy:
    """`given`, or else the policy's base under its adapters.

    Raises:
        ValueError: there is neither.
    """
    if given is not None:
        return ReferencePolicy(given, choose_lm_head(given, device, elements=head.elements))
    if not lora.has_adapters(policy):
        raise ValueError(
            "this objective compares with a reference policy: give its model's folder, or train"
            " adapters (fsdp.lora), whose base is the reference"
        )
    return ReferencePolicy(policy, head, adapted=True)
