"""What a command prints: in a file as far as that may grow, and its last line."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO

from tracegrad.runner.sandbox import SandboxUnavailable

MAX_OUTPUT = 64 << 20  # bytes of it that are kept in its file: the first ones
CHUNK = 64 << 10
_LAST_LINE_CHARS = 300


class OutputCapture:
    """`echo` gets all of it, too."""

    def __init__(self, file: BinaryIO, echo: Callable[[bytes], object] | None) -> None:
        self._file, self._echo = file, echo
        self._room = MAX_OUTPUT
        self._last = b""
        self._error: OSError | None = None

    def take(self, some: bytes) -> None:
        """Whoever prints is read also where the disk is full: else it would wait for that."""
        if self._error is None:
            try:
                self._keep(some[: self._room])
            except OSError as error:
                self._error = error
        self._room = max(0, self._room - len(some))
        self._last = (self._last + some)[-CHUNK:]
        if self._echo is not None:
            self._echo(some)

    def _keep(self, some: bytes) -> None:
        """At once, for somebody may be watching; and nothing waits for the file to be closed."""
        while some:
            some = some[os.write(self._file.fileno(), some) :]

    def check(self) -> None:
        """Raises SandboxUnavailable: not all that was to be kept is."""
        if self._error is not None:
            said = self._error.strerror or self._error
            raise SandboxUnavailable(f"what the command printed could not be kept: {said}")

    def last_line(self) -> str:
        lines = self._last.decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return said[:_LAST_LINE_CHARS]
