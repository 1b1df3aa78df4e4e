"""What a command prints: in a file as far as that may grow, and its last line."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

MAX_OUTPUT = 64 << 20  # bytes of it that are kept in its file: the first ones
CHUNK = 64 << 10
_LAST_LINE_CHARS = 300


class OutputCapture:
    """`echo` gets all of it, too."""

    def __init__(self, file: BinaryIO, echo: Callable[[bytes], object] | None) -> None:
        self._file, self._echo = file, echo
        self._room = MAX_OUTPUT
        self._last = b""

    def take(self, some: bytes) -> None:
        self._file.write(some[: self._room])
        self._file.flush()  # somebody may be watching
        self._room = max(0, self._room - len(some))
        self._last = (self._last + some)[-CHUNK:]
        if self._echo is not None:
            self._echo(some)

    def last_line(self) -> str:
        lines = self._last.decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return said[:_LAST_LINE_CHARS]
