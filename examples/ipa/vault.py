"""Vaults: each opens by a few tool calls in the right order, and jams at the first wrong one.

The only reward is for an open vault. Nine calls are possible at each of five turns: somebody who
tries at random opens one vault in 59,049.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

TOOLS = ("turn", "pull", "press")
PARTS = ("red", "blue", "green")
NAMES = ("amber", "birch", "cedar")
TURNS = 5

Call = tuple[str, str]  # tool and part

JAMMED = "jammed"
OPEN = "open"


class ReplayDiverged(RuntimeError):
    """The environment answered otherwise than it did the expert: what follows proves nothing."""


@dataclass(frozen=True, slots=True)
class Expert:
    """What somebody who knows the vault did, and what they saw."""

    vault: str
    calls: tuple[Call, ...]
    seen: tuple[str, ...]  # behind each call


class Vault:
    """Deterministic; `reset` puts it into the state behind any calls."""

    def __init__(self, name: str, turns: int = TURNS) -> None:
        self.name = name
        rng = random.Random(f"vault {name}")
        self.order = [rng.choice(list(product(TOOLS, PARTS))) for _ in range(turns)]
        self._bolts = 0  # open ones
        self._jammed = False

    @property
    def state(self) -> str:
        """What is to be seen: which vault, and how many of its bolts are open."""
        return f"{self.name}{self._bolts}"

    @property
    def opened(self) -> bool:
        return self._bolts == len(self.order)

    @property
    def done(self) -> bool:
        return self.opened or self._jammed

    def call(self, call: Call | None) -> str:
        """What is to be seen behind a call; None is one that makes no sense."""
        assert not self.done, "nothing happens any more"
        if call != self.order[self._bolts]:
            self._jammed = True
            return JAMMED
        self._bolts += 1
        return OPEN if self.opened else self.state

    def reset(self, prefix: Sequence[Call] = (), seen: Sequence[str] | None = None) -> list[str]:
        """As new, then `prefix` again; what is seen on the way.

        Raises ReplayDiverged if that is not what was `seen` the first time.
        """
        self._bolts, self._jammed = 0, False
        found = [self.call(call) for call in prefix]
        if seen is not None and found != list(seen):
            raise ReplayDiverged(f"vault {self.name}: saw {found}, the expert {list(seen)}")
        return found


def expert(name: str, turns: int = TURNS) -> Expert:
    """Somebody who read the plan of the vault opens it."""
    vault = Vault(name, turns)
    calls = tuple(vault.order)
    return Expert(name, calls, tuple(vault.reset(calls)))
