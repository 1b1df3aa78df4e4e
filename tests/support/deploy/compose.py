"""deploy/compose.yaml, read as Compose reads it: anchors, merged keys, variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from support.packages.wheel import ROOT

FOLDER = ROOT / "deploy"
FILE, CPU_FILE, EXAMPLE = (
    FOLDER / name for name in ("compose.yaml", "compose.cpu.yaml", ".env.example")
)
SECRETS = {
    "POSTGRES_PASSWORD": "p" * 40,
    "TRACEGRAD_API_KEY": "a" * 40,
    "TRACEGRAD_PROXY_CONTROL_KEY": "c" * 40,
}
Json = dict[str, Any]

_VARIABLE = re.compile(r"\$\{(\w+)(?:(:-|:\?)([^}]*))?\}")


class MissingVariable(ValueError):
    """A variable that must be given."""


class _Loader(yaml.SafeLoader):
    """`!reset`: Compose forgets what the files before have there."""


_Loader.add_constructor("!reset", lambda loader, node: loader.construct_sequence(node))


def example() -> dict[str, str]:
    """The variables of .env.example."""
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def variables_of(text: str) -> set[str]:
    """All that a file asks for."""
    return {found[1] for found in _VARIABLE.finditer(text)}


def load(path: Path = FILE, given: Mapping[str, str] | None = None) -> Json:
    """Raises MissingVariable."""
    values = {**example(), **SECRETS} if given is None else given

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        if values.get(name):
            return values[name]
        if kind == ":?":
            raise MissingVariable(f"{name}: {rest}")
        return rest or ""

    made: Json = _replaced(yaml.load(path.read_text(encoding="utf-8"), _Loader), value)
    return made


def _replaced(thing: Any, value: Callable[[re.Match[str]], str]) -> Any:
    """Variables in all texts behind the parser, as Compose does it: they stay texts."""
    if isinstance(thing, dict):
        return {name: _replaced(each, value) for name, each in thing.items()}
    if isinstance(thing, list):
        return [_replaced(each, value) for each in thing]
    return _VARIABLE.sub(value, thing) if isinstance(thing, str) else thing


def services(path: Path = FILE) -> dict[str, Json]:
    found: dict[str, Json] = load(path)["services"]
    return found


def seconds(duration: str) -> float:
    """`11m`, `30s`, `1h`."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    return sum(float(n) * units[unit] for n, unit in re.findall(r"([\d.]+)([smh])", duration))
