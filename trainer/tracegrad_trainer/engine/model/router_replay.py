"""Replay of a mixture's routing: the training forward takes the experts that were chosen before.

A token whose expert flips between two engines, or between two forwards, has two different
probabilities for no reason of the policy's. Replayed, the choice is given and the gates are
computed from the router's present scores: gate_i = I exp(s_i) / sum I exp(s), so that the router
still gets its gradient. `r2` replays our own choice of before the batch (`recording`), `r3` the
serving engine's, which the rows have (`batches.routes`). (GSPO, arXiv 2507.18071; rollout routing
replay, arXiv 2510.11370.)

Every router of transformers' mixtures chooses by `topk` over its experts: that call is what is
answered from the record, and whatever the router makes of the chosen scores stays its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.return_types import topk as TopK

from tracegrad_trainer.batches import ExpertRouting, MicroBatch, RoutingLayout
from tracegrad_trainer.batches.expert_routing import UNROUTED


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
            chosen = torch.where(self.given == UNROUTED, chosen, self.given)
            values = scores.gather(1, chosen)
        self.taken = chosen
        return TopK((values, chosen))


def install_replay(model: nn.Module) -> None:
    """Make the model's forward take the keyword `routes`, i[T, routers, k] or None. In place.

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


def is_installed(model: nn.Module) -> bool:
    return hasattr(model, "tracegrad_routers")


def _follow(router: nn.Module, layer: int, state: dict[str, Tensor | None]) -> None:
    own = router.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        routes = state["routes"]
        choice = _Choice(router, None if routes is None else routes[:, layer].long())
        with choice:
            answer = own(*args, **kwargs)
        assert choice.taken is not None, "the router chose by other means than topk"
        router.last_choice = choice.taken
        return answer

    router.forward = forward


@contextmanager
def recording_routing(model: nn.Module) -> Iterator[list[ExpertRouting]]:
    """Fills the list with the choices of each forward of the model within, [T, routers, k]; of a
    model whose routes are not replayed it stays empty."""
    seen: list[ExpertRouting] = []
    if not is_installed(model):
        yield seen
        return
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


def with_routing(
    micro_batches: Sequence[MicroBatch], seen: Sequence[ExpertRouting]
) -> list[MicroBatch]:
    """The micro-batches with what was recorded of a forward of each."""
    return [
        replace(batch, expert_routing=routes)
        for batch, routes in zip(micro_batches, seen, strict=True)
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


def check_replay(model: nn.Module, setting: str) -> None:
    """Raises ValueError: the model's routes cannot be replayed like that, r2 or r3."""
    if setting == "r3":
        routing_layout_of(model)
    else:
        _routers(model)


def routing_layout_of(model: nn.Module) -> RoutingLayout:
    """What an engine's routes of this model must look like; it may be on the meta device.

    Raises:
        ValueError: it has no routers that are known, or not one in a layer at most.
    """
    routers: list[Any] = _routers(model)
    numbers = {id(router): i for i, router in enumerate(routers)}
    layers: Any = getattr(model.base_model, "layers", ())
    inside = [[numbers[id(m)] for m in layer.modules() if id(m) in numbers] for layer in layers]
    shapes = {(int(router.num_experts), int(router.top_k)) for router in routers}
    if len(shapes) > 1 or [n for found in inside for n in found[:1]] != list(range(len(routers))):
        raise ValueError(
            f"fsdp.routing = 'r3': the routers of {type(model).__name__} are not one in a layer,"
            " all alike: an engine's routes are not known to be theirs; set it to 'r2' or 'own'"
        )
    [(experts, k)] = shapes
    routed = tuple(i for i, found in enumerate(inside) if found)
    return RoutingLayout(layers=len(layers), routed=routed, experts=experts, k=k)
