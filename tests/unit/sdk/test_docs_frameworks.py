"""docs/frameworks.md against the table of frameworks, and against the pins of their tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tracegrad.frameworks import FRAMEWORKS, Framework

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
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
    examples = dict(re.findall(r"^\| \[.+\]\(#.+\) \| `(.+)` \| (.+) \| .+ \|$", PAGE, re.M))
    assert set(examples) == {each.name for each in FRAMEWORKS}
    for framework in FRAMEWORKS:
        example = re.search(r"examples/frameworks/(\w+)\.py", section(framework))
        if example is None:
            assert examples[framework.name] == "-"
            continue
        pins = (PINS / f"{example[1]}.txt").read_text(encoding="utf-8").splitlines()
        packages = (example[1], *framework.packages, *framework.aliases)
        assert {f"{each}=={examples[framework.name]}" for each in packages} & set(pins)
