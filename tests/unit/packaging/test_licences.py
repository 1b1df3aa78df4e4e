"""What others wrote and the packages ship is in NOTICE, with its licence beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from support.packages.wheel import PACKAGES, ROOT

# `path: name version, licence, path of its text`
ENTRY = re.compile(r"^(\S+): \S+ \S+, [\w.-]+, (\S+)$", re.MULTILINE)
FOREIGN_NAME = re.compile(r"\.min\.(js|css|mjs)$|\.iife\.|(^|/)vendor(ed)?/|uplot", re.IGNORECASE)
FOREIGN_TEXT = re.compile(
    rb"@license|/\*!|\bcopyright\b[^\n]{0,20}(\(c\)|\xc2\xa9|\d{4})", re.IGNORECASE
)


def foreign(files: Mapping[str, bytes]) -> set[str]:
    """Which of these files somebody else wrote: by their path, or by what their beginning says."""
    licences = re.compile(r"licen[cs]e", re.IGNORECASE)
    return {
        name
        for name, text in files.items()
        if not licences.search(Path(name).name)
        and (FOREIGN_NAME.search(name) or FOREIGN_TEXT.search(text[:2000]))
    }


def entries(notice: str) -> dict[str, str]:
    """Path of each file that others wrote -> path of its licence."""
    return dict(ENTRY.findall(notice))


def test_every_vendored_file_has_its_licence() -> None:
    files = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for package in PACKAGES
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    listed = entries((ROOT / "NOTICE").read_text(encoding="utf-8"))
    assert foreign(files) == set(listed), "NOTICE has a line for each, and for nothing else"
    for name, licence in listed.items():
        assert licence in files, f"{name}: {licence} is shipped beside it"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sdk/tracegrad/ui/static/chart.min.js", b""),
        ("sdk/tracegrad/ui/static/vendor/chart.js", b""),
        ("sdk/tracegrad/ui/static/chart.js", b"/*! chart 1.0 */"),
        ("sdk/tracegrad/ui/chart.py", b"# Copyright (c) 2020 Somebody"),
    ],
)
def test_such_files_are_found(name: str, text: bytes) -> None:
    assert foreign({name: text, "sdk/tracegrad/ours.py": b"'''Ours.'''"}) == {name}


def test_a_line_of_notice_names_file_and_licence() -> None:
    line = "a/vendor/chart.js: chart 1.6, MIT, a/vendor/chart.LICENSE"
    assert entries(f"words\n{line}\nwords") == {"a/vendor/chart.js": "a/vendor/chart.LICENSE"}
