"""Who may import whom: floors, layers inside of packages, and no circles, held against the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SDK = ROOT / "sdk" / "tracegrad"
TRAINER = ROOT / "trainer" / "tracegrad_trainer"
INTEGRATIONS = ROOT / "integrations" / "tracegrad_integrations"
SOURCES = (SDK, TRAINER, INTEGRATIONS)

# Part -> its floor. A file imports only floors below its own, or its own part.
FLOORS = {
    "tracegrad.urls": -1,
    "tracegrad.protocol": -1,
    "tracegrad.private_files": -1,
    "tracegrad.jsonutil": -1,
    "tracegrad.import_path": -1,
    "tracegrad.version": -1,
    "tracegrad.settings_sources": -1,
    "tracegrad.text_format": -1,
    "tracegrad.environment": -1,
    "tracegrad.signal_errors": -1,
    "tracegrad.host_memory": -1,
    "tracegrad.pass_at_k": -1,
    "tracegrad.sized_cache": -1,
    "tracegrad.frameworks": -1,
    "tracegrad.import_hook": -1,
    "tracegrad.genai_attributes": -1,
    "tracegrad.events": 0,
    "tracegrad.turn_scopes": 0,
    "tracegrad.serializer": 0,
    "tracegrad.journal": 0,
    "tracegrad.transport": 0,
    "tracegrad.key_derivation": 0,
    "tracegrad.atomic_file": 0,
    "tracegrad.client_environ": 0,
    "tracegrad.call_check": 0,
    "tracegrad.dspy_cache": 0,
    "tracegrad.openai_agents_traces": 0,
    "tracegrad.log_format": 0,
    "tracegrad.digests": 0,
    "tracegrad.turn_tree": 1,
    "tracegrad.context": 1,
    "tracegrad.task_ids": 1,
    "tracegrad.exporter": 1,
    "tracegrad.open_rollouts": 2,
    "tracegrad.resend": 2,
    "tracegrad.http_patching": 2,
    "tracegrad.telemetry": 2,
    "tracegrad.feedback_client": 2,
    "tracegrad.intake_client": 2,
    "tracegrad.store": 2,
    "tracegrad.chat": 2,
    "tracegrad.ag2_spans": 3,
    "tracegrad.instrumentation": 4,
    "tracegrad.instrument_variable": 5,
    "tracegrad.thread_patching": 3,
    "tracegrad.decorators": 4,
    "tracegrad.transfer": 3,
    "tracegrad.proxy.config": 3,
    "tracegrad.proxy.store_async": 3,
    "tracegrad.proxy.shared_log": 3,
    "tracegrad.proxy.http": 4,
    "tracegrad.proxy.dialects": 5,
    "tracegrad.proxy.prompt_reuse": 6,
    # Reads recorded calls in every dialect; the proxy serves the page that shows them.
    "tracegrad.inspect": 7,
    "tracegrad.ui": 8,
    "tracegrad.proxy": 9,
    "tracegrad.runner": 9,
    "tracegrad.cli": 10,
    "tracegrad_integrations": 10,
    "tracegrad_trainer": 11,
    "tracegrad": 11,  # the package's own __init__ gathers the public names
}
# Package -> its layers, the lowest first. Parts of one layer do not import each other.
LAYERS: dict[str, tuple[str, ...]] = {
    "tracegrad.store": (
        "checkpoint_manifest errors models rows types",
        "databases expressions migrations migrate",
        "filters retry encoding",
        "read write",
        "store",
        "ledger anchors copy",
        "maintenance",
    ),
    "tracegrad.proxy": (
        "shared_counts",
        "auth store_writer",
        "engine",
        "metrics",
        "capture",
        "otel",
        "endpoints",
        "app",
        "workers",
        "cli",
    ),
    "tracegrad.ui": (
        "paging proxy_state security",
        "environment",
        "live pages frame",
        "endpoints",
        "app single_file",
    ),
    "tracegrad.cli": (
        "missing_dependency render options store_option",
        "run_invocation terminal",
        "commands",
        "app",
        "__main__",
    ),
    "tracegrad_trainer": (
        "utils",
        "metrics losses evaluation",
        "batches guards rewards",
        "engine",
        "config",
        "launch",
        "inference",
        "promotion resampling",
        "rl",
        "sft replay",
        "cli",
        "__main__",
    ),
    "tracegrad_trainer.engine": (
        "config",
        "rendezvous random_state peak_flops",
        "distributed",
        "attention",
        "context_parallel",
        "model",
        "flops",
        "step",
        "checkpoint",
    ),
}
HEAVY = {"sqlalchemy", "alembic", "fastapi", "starlette", "uvicorn", "aiohttp", "pydantic",
         "pydantic_settings", "numpy", "torch", "vllm", "rich", "typer"}  # fmt: skip
NOT_THE_AGENTS = {f"tracegrad.{part}" for part in ("settings_sources", "store", "chat", "proxy",
                  "proxy.config", "proxy.store_async", "proxy.shared_log", "proxy.http",
                  "proxy.dialects", "proxy.prompt_reuse", "inspect", "ui", "cli")}  # fmt: skip


def module_name(path: Path) -> str:
    root = next(source.parent for source in SOURCES if path.is_relative_to(source))
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(path for source in SOURCES for path in source.rglob("*.py"))
MODULES = {module_name(path): path for path in FILES}


def part_of(module: str) -> str:
    while module not in FLOORS:
        module, dot, _ = module.rpartition(".")
        if not dot:
            return ""
    return module


@cache
def imports_of(path: Path, *, types: bool = True) -> frozenset[str]:
    """Those inside of functions too; with `types` those under TYPE_CHECKING."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    if not types:
        tree.body = [node for node in tree.body if not _is_type_checking(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module_name(path).split(".")
            package = package if path.stem == "__init__" else package[:-1]
            package = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(found)


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def modules_imported(module: str, *, types: bool = True) -> Iterator[str]:
    for name in imports_of(MODULES[module], types=types):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        if name and name != module:
            yield name


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


@pytest.mark.parametrize("package", LAYERS)
def test_a_package_imports_downwards(package: str) -> None:
    layer = {name: n for n, names in enumerate(LAYERS[package]) for name in names.split()}

    def inner(module: str) -> str:
        return module.removeprefix(f"{package}.").partition(".")[0]

    inside = {m for m in MODULES if m.startswith(f"{package}.") and part_of(m) == part_of(package)}
    assert {inner(module) for module in inside} == set(layer), "LAYERS names other parts"
    upwards = {
        f"{module} -> {name}"
        for module in inside
        for name in modules_imported(module)
        if name in inside
        and inner(name) != inner(module)
        and layer[inner(name)] >= layer[inner(module)]
    }
    assert not upwards, sorted(upwards)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """But for types: a check of settings names their class."""
    try:
        TopologicalSorter(
            {module: set(modules_imported(module, types=False)) for module in MODULES}
        ).prepare()
    except CycleError as circle:
        pytest.fail(" <- ".join(circle.args[1]))


@pytest.mark.parametrize(
    "path",
    [p for p in SDK.rglob("*.py") if part_of(module_name(p)) not in NOT_THE_AGENTS],
    ids=module_name,
)
def test_an_agents_process_stays_light(path: Path) -> None:
    heavy = {name.partition(".")[0] for name in imports_of(path)} & HEAVY
    assert not heavy, f"{module_name(path)} imports {sorted(heavy)}"


def test_the_floors_name_only_what_exists() -> None:
    missing = {part for part in FLOORS if part not in MODULES}
    assert not missing, f"FLOORS names {sorted(missing)}, which no file is"
