"""The reference has what is public, and the site has every page."""

from __future__ import annotations

import re
import tomllib

import tracegrad
from support.docs.blocks import DOCS

ROOT = DOCS.parent


def test_every_public_name_of_the_sdk_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: tracegrad\.(\w+)$", page, re.M))
    assert shown == set(tracegrad.__all__) - {"__version__"}


def test_every_page_has_a_place_in_the_navigation() -> None:
    """`make docs` says so, too, but takes the site's generator."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n", 1)[1]
    named = set(re.findall(r"([\w/-]+\.md)", navigation))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert pages - named == set()


def test_the_generator_of_the_site_is_in_no_other_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert any(each.startswith("mkdocs") for each in extras.pop("docs"))
    assert [each for needs in extras.values() for each in needs if "mkdocs" in each] == []
