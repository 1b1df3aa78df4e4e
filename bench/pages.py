"""What the benchmarks' commands share: their options, the folder they work in, their page."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What is imported from a checkout that is not installed.
_SOURCES = (ROOT, ROOT / "sdk", ROOT / "trainer", ROOT / "integrations")

Say = Callable[[str], None]


def our_path() -> dict[str, str]:
    """Variables with which `python -m bench...` is found from any folder, and so are our packages
    where they are not installed, and whatever this process finds by its own."""
    others = filter(None, [os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join([*map(str, _SOURCES), *others])}


def parser_of(name: str, description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """Of `python -m bench.NAME`, whose page is docs/bench-NAME.md."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help=f"{quick}; writes no page")
    page = ROOT / "docs" / f"bench-{name}.md"
    parser.set_defaults(page=page)
    parser.add_argument(
        "--out", type=Path, help=f"default: docs/{page.name}, unless --quick", default=None
    )
    return parser


def publish(text: str, options: argparse.Namespace) -> None:
    print(text)
    out = options.out if options.out or options.quick else options.page
    if out is not None:
        out.write_text(text)


def clock() -> Say:
    """Says things with the seconds since now."""
    start = time.monotonic()

    def say(words: str) -> None:
        print(f"{time.monotonic() - start:6.0f} s  {words}", file=sys.stderr, flush=True)

    return say
