"""What code uses of a package: the names it imports, the calls it makes with them, and whether the
package's source has these names with these parameters. Nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Use:
    """`module`:`path` is what is used; `keywords` and `positional`, where it is called."""

    module: str
    path: str
    called: bool = False
    keywords: tuple[str, ...] = ()
    positional: int = 0


def uses_of(code: str, package: str, objects: Mapping[str, str]) -> list[Use]:
    """What `code` uses of `package`. `objects`: variable -> module:class, for calls of methods."""
    tree = ast.parse(code)
    known: dict[str, tuple[str, str]] = {}  # a name in the code -> module, path in it
    for name, where in objects.items():
        module, _, path = where.partition(":")
        known[name] = (module, path)
    found: list[Use] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            for alias in node.names:
                known[alias.asname or alias.name] = (node.module or "", alias.name)
                found.append(Use(node.module or "", alias.name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == package:
                    known[alias.asname or alias.name] = (alias.name, "")
    found += _calls(tree, known)
    return found


def _calls(tree: ast.AST, known: Mapping[str, tuple[str, str]]) -> Iterator[Use]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        dotted = ast.unparse(node.func).split(".")
        if dotted[0] not in known:
            continue
        module, path = known[dotted[0]]
        full = ".".join(part for part in (path, *dotted[1:]) if part)
        keywords = tuple(each.arg for each in node.keywords if each.arg)
        yield Use(module, full, True, keywords, len(node.args))


class Source:
    """A package's source below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._parsed = cache(self._parse)

    def problem(self, use: Use) -> str | None:
        """Why the source does not have what is used; None: it does."""
        where = f"{use.module}:{use.path}"
        definitions = self.find(use.module, use.path)
        if not definitions:
            return f"{where} is not there"
        if not use.called:
            return None
        parameters = self._parameters(*definitions)
        if parameters is None:
            return None  # takes any
        names, positional = parameters
        unknown = [keyword for keyword in use.keywords if keyword not in names]
        if unknown:
            return f"{where} has no parameters {unknown}"
        if use.positional > positional:
            return f"{where} takes {positional} arguments by position, not {use.positional}"
        return None

    def find(self, module: str, path: str) -> tuple[str, Definition] | None:
        """(module, definition) of `path`, through what modules and classes hand on."""
        first, _, rest = path.partition(".")
        found = self._top(module, first)
        while found and rest:
            first, _, rest = rest.partition(".")
            found = self._member(*found, first)
        return found

    def _top(self, module: str, name: str) -> tuple[str, Definition] | None:
        tree = self._parsed(module)
        if tree is None:
            return None
        defined = [node for node in tree.body if isinstance(node, Definition) and node.name == name]
        if defined:
            return module, defined[-1]  # behind overloads
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._top(self._absolute(module, node), alias.name)
        return None

    def _member(self, module: str, owner: Definition, name: str) -> tuple[str, Definition] | None:
        if not isinstance(owner, ast.ClassDef):
            return None
        own = [n for n in owner.body if isinstance(n, _FUNCTIONS) and n.name == name]
        if own:
            return module, own[-1]
        for base in owner.bases:
            words = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            inherited = self.find(module, words)
            if inherited and (found := self._member(*inherited, name)):
                return found
        return None

    def _parameters(self, module: str, found: Definition) -> tuple[set[str], int] | None:
        """The names and how many may come by position; None where anything is taken."""
        bound = False
        if isinstance(found, ast.ClassDef):
            made = self._member(module, found, "__init__")
            if made is None:
                fields = {
                    node.target.id
                    for node in found.body
                    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
                }
                return fields, len(fields)
            module, found = made
            bound = True
        assert isinstance(found, _FUNCTIONS)
        arguments = found.args
        by_position = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        # `self` of a method is given by the call.
        bound = bound or by_position[:1] == ["self"]
        if arguments.kwarg is not None and _is_open(arguments.kwarg):
            return None
        names = {*by_position, *(each.arg for each in arguments.kwonlyargs)}
        return names, len(by_position) - bound

    def _parse(self, module: str) -> ast.Module | None:
        base = self.root.joinpath(*module.split("."))
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                return ast.parse(path.read_text(encoding="utf-8"))
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        base = self.root.joinpath(*module.split("."))
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + (base / "__init__.py").is_file()]
        return ".".join([*parts, *([node.module] if node.module else [])])


def _is_open(kwarg: ast.arg) -> bool:
    """`**kwargs: Never` takes none."""
    return kwarg.annotation is None or ast.unparse(kwarg.annotation) != "Never"
