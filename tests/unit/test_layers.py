"""Who may import whom: the floors of the house, held against the code's own imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SDK = ROOT / "sdk" / "tracegrad"
TRAINER = ROOT / "trainer" / "tracegrad_trainer"
INTEGRATIONS = ROOT / "integrations" / "tracegrad_integrations"
WINGS = (SDK, TRAINER, INTEGRATIONS)

# Part of the house -> its floor. A file imports only floors below its own, or its own part.
FLOORS = {
    "tracegrad.urls": -1,
    "tracegrad.private_files": -1,
    "tracegrad.events": 0,
    "tracegrad.proxy.config": 0,
    "tracegrad.turn_tree": 1,
    "tracegrad.serializer": 0,
    "tracegrad.journal": 0,
    "tracegrad.transport": 0,
    "tracegrad.key_derivation": 0,
    "tracegrad.context": 1,
    "tracegrad.task_ids": 1,
    "tracegrad.resend": 2,
    "tracegrad.exporter": 1,
    "tracegrad.http_patching": 2,
    "tracegrad.store": 2,
    "tracegrad.telemetry": 2,
    "tracegrad.proxy": 3,
    "tracegrad.transfer": 3,
    "tracegrad.decorators": 3,
    "tracegrad_trainer": 5,
    "tracegrad.cli": 4,
    "tracegrad_integrations": 4,
    "tracegrad": 5,  # the package's own __init__ gathers the public names
}
HEAVY = {"sqlalchemy", "alembic", "fastapi", "starlette", "uvicorn", "aiohttp", "pydantic",
         "pydantic_settings", "numpy", "torch", "vllm", "rich", "typer"}  # fmt: skip


def module_name(path: Path) -> str:
    root = next(wing.parent for wing in WINGS if path.is_relative_to(wing))
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    while module not in FLOORS:
        module, dot, _ = module.rpartition(".")
        if not dot:
            return ""
    return module


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module_name(path).split(".")
            package = package if path.stem == "__init__" else package[:-1]
            package = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(path for wing in WINGS for path in wing.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_imports_only_floors_below_its_own(path: Path) -> None:
    module = module_name(path)
    own = part_of(module)
    assert own, f"{module} belongs to no floor: name it in FLOORS"
    above = {
        name
        for name in imports_of(path)
        if (part := part_of(name)) and part != own and FLOORS[part] >= FLOORS[own]
    }
    assert not above, f"{module} (floor {FLOORS[own]}) imports {sorted(above)}"


@pytest.mark.parametrize(
    "path",
    [p for p in SDK.rglob("*.py") if part_of(module_name(p)) not in
     {"tracegrad.store", "tracegrad.proxy", "tracegrad.proxy.config", "tracegrad.cli"}],
    ids=module_name,
)  # fmt: skip
def test_an_agents_process_stays_light(path: Path) -> None:
    heavy = {name.partition(".")[0] for name in imports_of(path)} & HEAVY
    assert not heavy, f"{module_name(path)} imports {sorted(heavy)}"


def test_the_floors_name_only_what_exists() -> None:
    modules = {module_name(path) for path in FILES}
    missing = {part for part in FLOORS if part not in modules}
    assert not missing, f"FLOORS names {sorted(missing)}, which no file is"
