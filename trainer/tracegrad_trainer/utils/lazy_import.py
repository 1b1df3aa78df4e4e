"""Names of a package that are imported when they are first asked for: torch takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_getattr(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], object]:
    """A package's `__getattr__` (PEP 562); `homes`: names by the module that defines them.

    A name must not be a module's of the package: once that is imported, it would be found instead.
    """
    modules = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find
