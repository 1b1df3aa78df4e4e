"""docs/frameworks.md against the table of frameworks, and against the pins of their tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tracegrad.frameworks import FRAMEWORKS, Framework

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
AT_A_GLANCE = re.findall(
    r"^\| \[.+\]\(#.+\) \| `(.+)` \| (.+) \| (\d|-|\d, .+) \| .+ \|$", PAGE, re.M
)
PINS = ROOT / "tests" / "frameworks" / "requirements"


def section(framework: Framework) -> str:
    head = f"\n## {framework.title}\n"
    assert head in PAGE
    return PAGE.split(head, 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda each: each.name)
def test_each_framework_has_its_section(framework: Framework) -> None:
    text = section(framework)
    assert "pip install" in text
    assert framework.native or framework.instrumentors[0] in text
    rows = re.findall(r"^\| (.+) \| (.+) \|$", text, re.M)[1:]
    assert rows == [(trap.what, trap.remedy) for trap in framework.traps]
    for report in framework.reports:
        assert report.unless[0][0] in text


def test_the_versions_are_those_that_are_tested() -> None:
    examples = {name: seen for name, seen, _ in AT_A_GLANCE}
    assert set(examples) == {each.name for each in FRAMEWORKS}
    for framework in FRAMEWORKS:
        example = re.search(r"examples/frameworks/(\w+)\.py", section(framework))
        if example is None:
            assert examples[framework.name] == "-"
            continue
        pins = (PINS / f"{example[1]}.txt").read_text(encoding="utf-8").splitlines()
        first, *others = examples[framework.name].split("; ")
        assert {f"{each}=={first}" for each in (framework.name, *framework.packages)} & set(pins)
        assert {each.replace(" ", "==") for each in others} <= set(pins)


def test_the_lines_are_those_that_are_numbered_in_the_example() -> None:
    lines = {name: count for name, _, count in AT_A_GLANCE}
    for framework in FRAMEWORKS:
        example = re.search(r"examples/frameworks/(\w+)\.py", section(framework))
        if example is None:
            assert lines[framework.name] == "-"
            continue
        text = (ROOT / "examples" / "frameworks" / f"{example[1]}.py").read_text(encoding="utf-8")
        assert lines[framework.name].split(",")[0] == max(re.findall(r"  # (\d)$", text, re.M))


def test_the_readme_counts_them() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"for LangGraph, openai-agents, CrewAI, DSPy and (\w+) more", text)
    assert found is not None
    agents = [each for each in FRAMEWORKS if not (each.is_client or each.is_addon)]
    assert found[1] == {9: "nine", 10: "ten", 11: "eleven"}[len(agents) - 4]
