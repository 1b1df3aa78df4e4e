"""Which experts of a mixture the serving engine chose, from its turns to the tokens of a row.

A turn has them (`Turn.routed_experts`) from some token of its prompt on up to its last token but
one: the last was never forwarded, and what came before them a turn that it continues has, if any
turn has. A row joins the records of all turns of its path. Where two of them cover one
token, as when a prompt was computed again, the one that is first on the path counts: its
sampled tokens were predicted with that, and a row has one record a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.events import Turn
from tracegrad.store.encoding.routed_experts import check_routing
from tracegrad_trainer.batches.turn_access import length_of

# A token without a record: the router chooses for it.
UNROUTED = -1

ExpertRouting = NDArray[np.signedinteger[Any]]  # [T, routers, k]
# What vLLM writes (0.32, `--enable-return-routed-experts`), by the bytes of an item.
_WIRE: dict[int, str] = {1: "u1", 2: "<u2", 4: "<i4"}


@dataclass(frozen=True, slots=True)
class RoutingLayout:
    """A mixture of experts as its engine's records show it."""

    layers: int  # all that the model has: engines count those without a router too
    routed: tuple[int, ...]  # those that have one
    experts: int  # of a layer
    k: int  # of them that a token goes to

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest that holds every expert and `UNROUTED`: a token of a model of 48 layers is
        sent to 384 experts."""
        return np.dtype(np.int8 if self.experts <= 128 else np.int16)

    def unknown(self, tokens: int) -> ExpertRouting:
        """So many tokens without a record."""
        routing: ExpertRouting = np.full((tokens, len(self.routed), self.k), UNROUTED, self.dtype)
        return routing


@dataclass(frozen=True, slots=True, eq=False)
class TurnRouting:
    """A turn's record of the tokens from `start` on; places in its prompt and completion."""

    start: int
    experts: ExpertRouting

    @property
    def stop(self) -> int:
        return self.start + len(self.experts)


def routing_of_path(
    path: Sequence[Turn], tokens: int, layout: RoutingLayout
) -> ExpertRouting | None:
    """Expert routing of a path's `tokens`, root to leaf; None: no turn has a record."""
    routing: ExpertRouting | None = None
    # The first turn's record counts: it is written last.
    for turn in reversed(path):
        if (known := routing_of_turn(turn, layout)) is not None:
            routing = layout.unknown(tokens) if routing is None else routing
            routing[known.start : known.stop] = known.experts
    return routing


def routing_of_turn(turn: Turn, layout: RoutingLayout) -> TurnRouting | None:
    """The turn's own record, of layers with a router.

    Raises:
        ValueError: its record cannot be read, or is another model's. That is no reason to leave
            out the turn, or its routing: a store that was filled by another model has them all
            like that, and a step that quietly replayed nothing would be the user's `r3` in name
            only. Nothing was trained yet.
    """
    if turn.routed_experts is None or not turn.prompt_token_ids:
        return None  # without a prompt nobody knows where its tokens stand
    try:
        shape = check_routing(turn.routed_experts, length_of(turn))
        found = np.frombuffer(turn.routed_experts, _WIRE[shape.item], offset=shape.start)
        found = found.reshape(shape.tokens, shape.layers, shape.k)
        _check(found, layout)
    except ValueError as error:
        raise ValueError(
            f"routed experts of turn {turn.turn_id}: {error}; set fsdp.routing = 'r2' or 'own',"
            " or leave such rollouts out (data.tags)"
        ) from error
    if len(layout.routed) < layout.layers:
        found = found[:, list(layout.routed)]
    return TurnRouting(length_of(turn) - 1 - shape.tokens, found.astype(layout.dtype))


def _check(found: NDArray[Any], layout: RoutingLayout) -> None:
    _, layers, k = found.shape
    if (layers, k) != (layout.layers, layout.k):
        raise ValueError(
            f"they are another model's, of {layers} layers and {k} experts a token: this one has"
            f" {layout.layers} and {layout.k}"
        )
    if not 0 <= int(found.min()) <= int(found.max()) < layout.experts:
        raise ValueError(
            f"they are another model's: they name experts {found.min()} to {found.max()}, this"
            f" one has {layout.experts} a layer"
        )


def known_tokens(routing: ExpertRouting | None) -> int:
    """The number of tokens with a record."""
    return 0 if routing is None else int(np.count_nonzero(routing[:, 0, 0] != UNROUTED))
