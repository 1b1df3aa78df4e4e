"""Named parts: a dictionary whose misses say what there is. A user's own are import paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

from tracegrad.import_path import import_part, is_import_path
from tracegrad_trainer.losses.part_names import PARTS

F = TypeVar("F", bound=Callable[..., object])


class Registry(Generic[F]):
    """Parts of one kind, which is also the name of the settings' field that chooses one."""

    def __init__(self, kind: str) -> None:
        assert kind in PARTS, f"{kind} is no kind of part"
        self.kind = kind
        self._parts: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        def add(part: F) -> F:
            assert name in PARTS[self.kind], (
                f"{self.kind} {name!r}: name it in part_names.PARTS too"
            )
            assert name not in self._parts, f"{self.kind} {name!r} is taken"
            self._parts[name] = part
            return part

        return add

    def __getitem__(self, name: str) -> F:
        """The part of this name, or the function at this path (`package.module:function`).

        Raises:
            ValueError: there is none.
        """
        check_part(self.kind, name)
        return cast(F, import_part(self.kind, name)) if is_import_path(name) else self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)


def check_part(kind: str, name: str) -> None:
    """Whether there is such a part.

    Raises:
        ValueError: there is none.
    """
    if is_import_path(name):
        import_part(kind, name)
    elif name not in PARTS[kind]:
        raise ValueError(
            f"unknown {kind} {name!r}: use one of {', '.join(PARTS[kind])},"
            " or package.module:function"
        )
