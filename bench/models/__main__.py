"""`python -m bench.models`: which kinds of models train, and whether each form of their export says
what the trainer says, in transformers and in vLLM. Writes docs/bench-models.md."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.models.families import FAMILIES, IMPORTS
from bench.models.measured import Measured, measure
from bench.pages import clock, parser_of, publish
from bench.proxy.machine import description
from bench.tables import markdown

HEADER = ("family", "trains", "whole", "merged adapters", "adapters (peft)", "vLLM, whole")
_TEXT = """# Kinds of models

Written by `python -m bench.models`; do not edit. Small random models of each kind train one step,
and are exported with all weights, with adapters merged into them, and as adapters alone. The
columns are the largest difference of a log-probability (nats) between transformers' of the export,
with its own attention, a row at a time, and the trainer's, of packed rows; and the median
difference between what vLLM samples from the export and transformers' of the same. All in float32,
but for what a note names.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("models", __doc__, quick="two kinds, without vLLM")
    parser.add_argument("--only", nargs="*", choices=list(FAMILIES), help="default: all")
    options = parser.parse_args(arguments)
    say = clock()
    chosen = options.only or (["Llama", "Qwen 3 MoE"] if options.quick else list(FAMILIES))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            say(name)
            place = Path(folder) / name.replace(" ", "-")
            found.append(measure(name, FAMILIES[name](), place, serve=not options.quick))
    publish(page(found, with_vllm=not options.quick), options)
    return 0


def page(found: Sequence[Measured], *, with_vllm: bool) -> str:
    packages = ["torch", "transformers", "peft", *(["vllm"] if with_vllm else [])]
    packages += [each for each in sorted(set(IMPORTS.values())) if find_spec(each)]
    lines = [_TEXT, *(f"- {line}" for line in description(packages)), ""]
    notes: list[str] = []
    rows = [_row(one, notes) for one in found]
    lines += [markdown(HEADER, rows), *(f"{n}. {note}" for n, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


def _row(one: Measured, notes: list[str]) -> list[str]:
    if one.refused:
        return [one.name, _note(f"{one.name}: {one.refused}", notes, "no"), "", "", "", ""]
    cells = [*one.transformers.values(), one.vllm]
    shown = [
        f"{cell:.0e}"
        if isinstance(cell, float)
        else _note(f"{one.name}: {cell}", notes, "no")
        if cell
        else ""
        for cell in cells
    ]
    if one.rounding is not None:
        dtype, apart = one.rounding
        said = f"{one.name}: vLLM's CPU build has it in {dtype} alone, in which transformers is"
        shown[-1] = _note(f"{said} {apart:.0e} from its own float32", notes, shown[-1])
    return [one.name, "yes", *shown]


def _note(text: str, notes: list[str], word: str) -> str:
    notes.append(" ".join(text.split())[:400])
    return f"{word} ({len(notes)})"


if __name__ == "__main__":
    sys.exit(main())
