"""The blocks of code of a page, with what the comment before each says about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>not run|file): (?P<said>.*?) -->\n)?"
    r"^(?P<fence>```+)(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """`not_run`: why no test runs it; `file`: under which name a reader saves it."""

    language: str
    text: str
    line: int
    not_run: str | None = None
    file: str | None = None


def blocks_of(page: str) -> list[Block]:
    """`page` as in `howto/langgraph.md`, in the order in which they stand there."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = []
    for each in _BLOCK.finditer(text):
        marks = {each["mark"]: each["said"]} if each["mark"] else {}
        found.append(
            Block(
                language=each["language"],
                text=each["text"],
                line=text.count("\n", 0, each.start("fence")) + 1,
                not_run=marks.get("not run"),
                file=marks.get("file"),
            )
        )
    assert len(found) * 2 == len(re.findall(r"^```", text, re.M)), f"{page}: a block is not closed"
    return found
