"""A model's transformer blocks: the units that are sharded, recomputed and exported."""

from __future__ import annotations

from torch import nn


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, in order; sharded or not.

    Raises:
        ValueError: the model's class does not say what they are.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    # FSDP gives modules a class of its own, above theirs.
    found = [
        module
        for module in model.modules()
        if names & {kind.__name__ for kind in type(module).__mro__}
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} names no blocks (_no_split_modules): it cannot be sharded"
        )
    return found
