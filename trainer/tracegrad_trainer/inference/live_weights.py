"""What the ranks hold, for a push that does not read it from files: rank 0 sends it, and the others
take part when it orders them to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

Named = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class GatherOrder:
    """Of rank 0 to the others: all gather all weights, one tensor at a time."""


class LiveWeights:
    """Rank 0's side. `version`: of the weights that the ranks have, while they follow orders; None:
    they do other things, and a push, of a thread that puts weights back, is of files."""

    def __init__(
        self, order: Callable[[GatherOrder], None], gather: Callable[[], Named], named: Naming
    ) -> None:
        """`order` hands it to the other ranks. `gather`: whole tensors in the dtype that is served,
        a collective to its end; `named`: those under the names of folders, and what is served
        beside."""
        self._order, self._gather, self._named = order, gather, named
        self.version: int | None = None

    @contextmanager
    def tensors(self) -> Iterator[Named]:
        """(checkpoint name, tensor), wherever the ranks compute."""
        self._order(GatherOrder())
        gathered = self._gather()
        try:
            yield self._named(gathered)
        finally:
            deque(gathered, maxlen=0)  # what rank 0 leaves half-way hangs the others


Naming = Callable[[Named], Named]
