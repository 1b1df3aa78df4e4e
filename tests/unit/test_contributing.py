"""CONTRIBUTING.md is held against the code: its layout, its floors, its two paths, its names."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SOURCES = (ROOT / "sdk", ROOT / "trainer", ROOT / "integrations")
# How often a reader of a path goes back to a file that it has passed.
MOST_JUMPS_BACK = 8


def block(heading: str) -> list[str]:
    """The lines of the first fenced block under a heading."""
    assert f"{heading}\n" in PAGE, f"CONTRIBUTING.md has no heading {heading!r}"
    section = PAGE.split(f"{heading}\n", 1)[1]
    found = re.search(r"^```\w*\n(.*?)^```$", section, re.S | re.M)
    assert found is not None, f"there is no fenced block under {heading!r}"
    return found[1].splitlines()


@cache
def modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for source in SOURCES:
        for path in source.rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def names_of(path: Path) -> Iterator[tuple[str, str]]:
    """What a file imports, as (module, name), anywhere in it; and the modules that it names in a
    string, to start them in a process of their own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and node.value in modules():
            yield (node.value, "")


def home_of(module: str, name: str) -> Path | None:
    """The file that defines a name: a package's `__init__` only hands it on."""
    if f"{module}.{name}" in modules():
        return modules()[f"{module}.{name}"]
    path = modules().get(module)
    if path is None or path.name != "__init__.py":
        return path
    if not name:  # `python -m package`
        return modules().get(f"{module}.__main__", path)
    given = [(source, alias) for source, alias in names_of(path) if alias == name]
    return home_of(*given[0]) if given else path


def parts_of(module: str) -> set[Path]:
    """The modules that a package's `__init__` imports whole: they register what they hold."""
    path = modules().get(module)
    if path is None or path.name != "__init__.py":
        return set()
    whole = {f"{module}.{name}" for source, name in names_of(path) if source == module}
    return {modules()[each] for each in whole & set(modules())}


@cache
def imports_of(path: Path) -> frozenset[Path]:
    found: set[Path] = set()
    for module, name in names_of(path):
        home = home_of(module, name)
        found |= parts_of(module) | ({home} if home is not None else set())
    return frozenset(found)


@pytest.mark.parametrize("heading", ["### One LLM call", "### One training step"])
def test_a_path_follows_the_imports(heading: str) -> None:
    path: list[Path] = []
    jumps: list[Path] = []
    for line in block(heading):
        file = ROOT / line.split()[0]
        assert file.is_file(), f"{line.split()[0]} is no file"
        joined = not path or file in path
        joined |= any(
            file in imports_of(earlier) or earlier in imports_of(file) for earlier in path
        )
        assert joined, f"no file before {line.split()[0]} imports it or is imported by it"
        if file in path:
            jumps.append(file)
        path.append(file)
    assert len(jumps) <= MOST_JUMPS_BACK, [file.name for file in jumps]


def test_the_layout_names_every_package_and_nothing_else() -> None:
    found: set[Path] = set()
    above: list[tuple[int, Path]] = []
    for line in block("## Layout"):
        name = line.split()[0]
        indent = len(line) - len(line.lstrip())
        while above and above[-1][0] >= indent:
            above.pop()
        if not name.endswith("/"):
            continue
        folder = (above[-1][1] if above else ROOT) / name
        assert folder.is_dir(), f"{folder.relative_to(ROOT)} is no folder"
        above.append((indent, folder))
        found.add(folder)
    packages = {path.parent for source in SOURCES for path in source.rglob("__init__.py")}
    missing = {folder for folder in packages - found if folder.name != "versions"}
    assert not missing, f"the layout lacks {sorted(str(m.relative_to(ROOT)) for m in missing)}"


def floors_text() -> list[str]:
    """FLOORS of tests/unit/test_layers.py as the page writes it."""
    tree = ast.parse((ROOT / "tests" / "unit" / "test_layers.py").read_text(encoding="utf-8"))
    assignments = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    (value,) = (
        node.value for node in assignments if re.match(r"FLOORS\b", ast.unparse(node)) is not None
    )
    assert value is not None
    floors: dict[str, int] = ast.literal_eval(value)
    lines: list[str] = []
    for floor in sorted(set(floors.values()), reverse=True):
        names = ", ".join(name for name, own in floors.items() if own == floor)
        lines += textwrap.wrap(names, 100, initial_indent=f"{floor:3}  ", subsequent_indent=" " * 5)
    return lines


def test_the_floors_are_those_of_the_layers_test() -> None:
    assert block("### Floors") == floors_text(), "put there:\n" + "\n".join(floors_text())


def test_every_file_that_is_named_is_there() -> None:
    named = set(re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|toml|txt|in|lock|json))`", PAGE))
    assert named
    starts = [ROOT, ROOT / "sdk" / "tracegrad", ROOT / "trainer" / "tracegrad_trainer"]
    missing = {name for name in named if not any((start / name).exists() for start in starts)}
    assert not missing, f"CONTRIBUTING.md names {sorted(missing)}, which are no files"


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)", PAGE)
    assert named
    for file, name in named:
        assert (ROOT / file).is_file(), f"{file} is no file"
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {name}"


READMES = sorted(
    path for source in (*SOURCES, ROOT / "examples", ROOT / "bench", ROOT / "tests")
    for path in source.rglob("README.md") if not path.is_relative_to(ROOT / "tests" / "support")
)  # fmt: skip


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_a_readmes_entry_points_are_there(path: Path) -> None:
    rows = re.findall(r"^\| `([\w/]+\.py)` \| ([^|]*) \|", path.read_text(encoding="utf-8"), re.M)
    assert rows, "it names no entry points"
    for file, names in rows:
        assert (path.parent / file).is_file(), f"{file} is no file"
        code = (path.parent / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            found = re.search(rf"^ *((async )?def|class) {name}\b|^{name}\b.*=", code, re.M)
            assert found is not None, f"{file} has no {name}"


def test_every_link_between_pages_leads_somewhere() -> None:
    pages = [*READMES, *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    broken = []
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text("utf-8")):
            file = page if not target[0] else page.parent / target[0]
            if target[0].startswith(("http:", "https:", "/")):
                continue
            if not file.exists() or (target[1] and target[1] not in anchors_of(file)):
                broken.append(f"{page.relative_to(ROOT)}: {'#'.join(target)}")
    assert not broken


def anchors_of(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
