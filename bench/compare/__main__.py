"""`python -m bench.compare`: counts again, and writes the table into docs/compare.md."""

from __future__ import annotations

import re

from bench.pages import ROOT

from .lines import table

PAGE = ROOT / "docs" / "compare.md"
BLOCK = re.compile(r"(?<=<!-- lines -->\n).*?(?=\n<!-- /lines -->)", re.S)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    if BLOCK.search(text) is None:
        raise ValueError(f"{PAGE} has no block between <!-- lines --> and <!-- /lines -->")
    PAGE.write_text(BLOCK.sub(lambda _: table(), text), encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main()
