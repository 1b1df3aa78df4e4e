"""Replay of a mixture's routing: the training forward takes the experts that were chosen before.

A token whose expert flips between two engines, or between two forwards, has two different
probabilities for no reason of the policy's. Replayed, the choice is given and the gates are
computed from the router's present scores: gate_i = I exp(s_i) / sum I exp(s), so that the router
still gets its gradient. `r2` replays our own choice of before the batch (`recording`), `r3` the
serving engine's (`read_vllm`). (GSPO, arXiv 2507.18071; rollout routing replay, arXiv 2510.11370.)

Every router of transformers' mixtures chooses by `topk` over its experts: that call is what is
answered from the record, and whatever the router makes of the chosen scores stays its own.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.return_types import topk as TopK

from tracegrad_trainer.batches import MicroBatch

# A token without a record: the router chooses for it.
OPEN = -1

Routes = NDArray[np.int16]  # [T, layers, k]


class _Choice(TorchFunctionMode):
    """Within a router's forward: answers its `topk`, or writes down what it answered."""

    def __init__(self, router: nn.Module, given: Tensor | None) -> None:
        super().__init__()
        self.experts = int(router.num_experts)  # type: ignore[arg-type]
        self.top_k = int(router.top_k)  # type: ignore[arg-type]
        self.given = given  # [T, k]
        self.taken: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk):
            return answer
        values, chosen = answer
        scores: Tensor = args[0] if args else kwargs["input"]
        # Some routers choose groups of experts first.
        if scores.ndim != 2 or scores.shape[1] != self.experts or chosen.shape[1] != self.top_k:
            return answer
        if self.given is not None:
            assert self.given.shape == chosen.shape, "one choice for each token"
            chosen = torch.where(self.given == OPEN, chosen, self.given)
            values = scores.gather(1, chosen)
        self.taken = chosen
        return TopK((values, chosen))


def install(model: nn.Module) -> None:
    """Make the model's forward take the keyword `routes`, i64[T, layers, k] or None. In place.

    What was given holds until the next forward: a checkpointed block runs again in backward.

    Raises:
        ValueError: the model has no routers that are known.
    """
    routers = _routers(model)
    state: dict[str, Tensor | None] = {"routes": None}
    for layer, router in enumerate(routers):
        _follow(router, layer, state)
    backbone: Any = model.base_model

    def take(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        routes = kwargs.pop("routes", None)
        assert routes is None or routes.shape[1] == len(routers), "one entry for each router"
        state["routes"] = routes
        return args, kwargs

    backbone.register_forward_pre_hook(take, with_kwargs=True)
    model.tracegrad_routers = routers  # type: ignore[assignment]


def installed(model: nn.Module) -> bool:
    return hasattr(model, "tracegrad_routers")


def _follow(router: nn.Module, layer: int, state: dict[str, Tensor | None]) -> None:
    own = router.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        routes = state["routes"]
        choice = _Choice(router, None if routes is None else routes[:, layer])
        with choice:
            answer = own(*args, **kwargs)
        assert choice.taken is not None, "the router chose by other means than topk"
        router.last_choice = choice.taken
        return answer

    router.forward = forward


@contextmanager
def recording(model: nn.Module) -> Iterator[list[Routes]]:
    """Fills the list with the choices of each forward of the model within, [T, layers, k]."""
    assert installed(model)
    seen: list[Routes] = []
    backbone: Any = model.base_model

    def note(module: nn.Module, args: Any, output: Any) -> None:
        routers: Any = model.tracegrad_routers
        choices = torch.stack([router.last_choice for router in routers], 1)
        seen.append(choices.to("cpu", torch.int16).numpy())

    hook = backbone.register_forward_hook(note)
    try:
        yield seen
    finally:
        hook.remove()


def routed(micro_batches: Sequence[MicroBatch], seen: Sequence[Routes]) -> list[MicroBatch]:
    """The micro-batches with what was recorded of a forward of each."""
    return [
        replace(batch, routes=routes) for batch, routes in zip(micro_batches, seen, strict=True)
    ]


def _routers(model: nn.Module) -> list[nn.Module]:
    """The modules that transformers records `router_logits` from, in order of the layers."""
    kinds: set[Any] = set()
    for module in model.modules():
        recorders = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            kinds.add(getattr(recorder, "target_class", recorder))
    found = [module for module in model.modules() if type(module) in kinds]
    if not found or not all(hasattr(r, "num_experts") and hasattr(r, "top_k") for r in found):
        raise ValueError(
            f"fsdp.routing: {type(model).__name__} has no routers that can be replayed:"
            " set fsdp.routing = 'own'"
        )
    return found


def read_vllm(text: str, *, tokens: int, start: int = 0) -> Routes:
    """`routed_experts` of a vLLM choice -> i16[tokens, layers, k], `OPEN` where there is none.

    vLLM (0.32, `--enable-return-routed-experts`) sends base64 of a `.npy` file [n, layers, k] of
    uint8, uint16 or int32: of prompt and completion together, but for the last sampled token,
    which was never forwarded, and for the first `routed_experts_prompt_start` = `start` tokens,
    which an earlier turn's answer has. `layers` counts all of the model's layers: see
    `of_routers` where some have no router.

    Raises:
        ValueError: it is not that, or not of so many tokens.
    """
    try:
        found = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError) as error:
        raise ValueError(f"routed_experts is not base64 of a .npy file: {error}") from error
    if found.ndim != 3 or found.dtype not in (np.uint8, np.uint16, np.int32):
        raise ValueError(
            f"routed_experts is {found.dtype}{list(found.shape)}: expected integers"
            " [tokens, layers, experts a token]"
        )
    if start + len(found) != tokens - 1:
        raise ValueError(
            f"routed_experts has {len(found)} tokens from the {start}th on: of a turn of {tokens}"
            f" tokens {tokens - 1 - start} were expected"
        )
    if found.size and int(found.max()) > np.iinfo(np.int16).max:
        raise ValueError(f"routed_experts names expert {found.max()}: there are not so many")
    routes = np.full((tokens, *found.shape[1:]), OPEN, np.int16)
    routes[start:-1] = found
    return routes


def of_routers(routes: Routes, model: nn.Module) -> Routes:
    """Of an engine's layers those that have a router in this model, [T, layers, k]."""
    routers: Any = {id(router) for router in _routers(model)}
    layers: Any = getattr(model.base_model, "layers", ())
    sparse = [i for i, layer in enumerate(layers) if any(id(m) in routers for m in layer.modules())]
    if routes.shape[1] != len(layers):
        raise ValueError(
            f"routes are of {routes.shape[1]} layers, the model has {len(layers)}:"
            " they are another model's"
        )
    return routes[:, sparse]
