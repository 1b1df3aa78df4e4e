"""Named parts: a dictionary whose misses say what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

F = TypeVar("F", bound=Callable[..., object])


class Registry(Generic[F]):
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._parts: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        def add(part: F) -> F:
            assert name not in self._parts, f"{self.kind} {name!r} is taken"
            self._parts[name] = part
            return part

        return add

    def __getitem__(self, name: str) -> F:
        """Raises ValueError naming the parts there are."""
        if name not in self._parts:
            raise ValueError(f"unknown {self.kind} {name!r}: use one of {', '.join(self._parts)}")
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)
