"""What is to be done as soon as a module is imported, by whomever and whenever: nothing is imported
for its sake.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportHook(MetaPathFinder):
    """A finder that runs a function when a module's own code has run, and before whoever imports
    the module goes on.

    A module that is imported already is the caller's own affair (`sys.modules`).
    """

    def __init__(self, functions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        """`functions`: by the names of modules. They must not raise what the importer is not to
        see."""
        self._functions = functions
        self._searching = _Searching()

    def install(self) -> None:
        """Before all other finders, once, however often it is asked for."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Another finder may ask all finders in its turn, this one too.
        if name not in self._functions or name in self._searching.names:
            return None
        self._searching.names.add(name)
        try:
            return self._found(name, path, target)
        finally:
            self._searching.names.discard(name)

    def _found(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(name, path, target)):
                _run_when_loaded(spec, self._functions[name])
                return spec  # type: ignore[no-any-return]
        return None


class _Searching(threading.local):
    """Modules that this thread is looking for."""

    def __init__(self) -> None:
        self.names: set[str] = set()


def _run_when_loaded(spec: ModuleSpec, function: Callable[[ModuleType], None]) -> None:
    loader: Any = spec.loader
    load = getattr(loader, "exec_module", None)
    if load is None:
        return

    def exec_module(module: ModuleType) -> None:
        with suppress(AttributeError):
            del loader.exec_module  # the loader is its own again
        load(module)
        if module.__name__ == spec.name:  # one loader may be that of several, as a zip file's is
            function(module)

    with suppress(AttributeError):  # a loader of somebody's that takes no attributes
        loader.exec_module = exec_module
