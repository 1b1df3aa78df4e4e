"""One check of a GPU: what it is asked, and what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

# "not run": something that it needs is not there; the line says what.
Verdict = Literal["right", "wrong", "not run"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where checks run. `tiny`: models and rows of a moment's work, to try the checks themselves.
    `folder` is a check's own, and is there again when it is repeated."""

    device: torch.device
    tiny: bool
    folder: Path

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def fsdp_device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.is_gpu else "cpu"

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def describe(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_gpu else "CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`said` is one line; `header` and `rows` a table for the page."""

    verdict: Verdict
    said: str
    header: tuple[str, ...] = ()
    rows: list[list[str]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Check:
    """`seconds`: what it takes on one H100, about; it is ended after three times that, or with the
    budget."""

    name: str
    seconds: int
    run: Callable[[Machine], Finding]
    needs_vllm: bool = False


def judged(right: bool, said: str, header: tuple[str, ...], rows: list[list[str]]) -> Finding:
    return Finding(verdict="right" if right else "wrong", said=said, header=header, rows=rows)


def in_a_line(error: Exception) -> str:
    """What a row failed of, for its cell: the other rows are worth having."""
    words = " ".join(str(error).split()).replace("|", "/")
    return f"{type(error).__name__}: {words}"[:160]
