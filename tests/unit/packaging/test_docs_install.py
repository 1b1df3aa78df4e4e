"""docs/install.md, CHANGELOG.md, RELEASING.md and the README against what they speak of."""

from __future__ import annotations

import re
import tomllib

import tracegrad
from support.packages import pythons
from support.packages.wheel import ROOT

PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_extra_has_its_row() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE.split("## Which Python")[0], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"\w+", row)}
    assert named - set(PROJECT["optional-dependencies"]) == set()
    # The site's own, which an installed tracegrad has no use for.
    assert set(PROJECT["optional-dependencies"]) - named <= {"docs"}


def test_pythons_are_those_of_the_metadata() -> None:
    prefix = "Programming Language :: Python :: "
    said = {each.removeprefix(prefix) for each in PROJECT["classifiers"] if prefix in each}
    assert said == {"3", *pythons.SUPPORTED}
    assert PROJECT["requires-python"] == f">={pythons.SUPPORTED[0]}"
    assert f"Python {pythons.SUPPORTED[0]} to {pythons.SUPPORTED[-1]}" in PAGE


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\](?: - (.+))?$", text, re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    version, date = headings[1]
    assert version == tracegrad.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d|unreleased", date)
    parts = set(re.findall(r"^### (\w+)$", text, re.MULTILINE))
    assert parts <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_sentence_that_a_release_changes_is_where_releasing_says() -> None:
    page = " ".join((ROOT / "RELEASING.md").read_text(encoding="utf-8").split())
    (sentence,) = re.findall(r'under \*Install\*: "(.+?)"', page)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert sentence in " ".join(readme.split())
