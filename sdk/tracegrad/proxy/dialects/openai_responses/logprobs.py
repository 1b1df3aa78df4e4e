"""Log-probabilities of a message's text, picked out of those of all sampled tokens.

The engine reports every token: also those of reasoning, of tool calls, and the marks between
them, and it may report some before the text they become. Which belong to the text is found by
their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tracegrad.events import Json


class TextLogprobs:
    """Tokens whose text has not been told yet."""

    def __init__(self) -> None:
        self._entries: list[Json] = []
        self._bytes = bytearray()
        self._ends: list[int] = []  # where each entry's bytes end in `_bytes`

    def add(self, entries: Iterable[Json]) -> None:
        """Entries of the engine's `logprobs.content`."""
        for entry in entries:
            self._entries.append(entry)
            self._bytes += bytes(_bytes_of(entry))
            self._ends.append(len(self._bytes))

    def take(self, text: str) -> list[Json]:
        """The entries that `text` was made of; what came before them is forgotten.

        A token that is in two texts is told with the first. Empty where the text is not among
        the tokens' bytes: a parser has changed it, and any choice would be wrong.
        """
        if not self._entries or not text:
            return []
        wanted = text.encode()
        start = self._start_of(wanted)
        if start is None:
            return []
        end = start + len(wanted)
        taken = [
            entry
            for entry, first, last in self._spans()
            if entry is not _TOLD and first < end and last > start
        ]
        self._forget(end)
        return taken

    def _start_of(self, wanted: bytes) -> int | None:
        """Where the text begins: at a token if it can, since marks have letters in them too."""
        for start in [0, *self._ends[:-1]]:
            if self._bytes.startswith(wanted, start):
                return start
        start = self._bytes.find(wanted)
        return start if start >= 0 else None

    def _spans(self) -> Iterable[tuple[Json, int, int]]:
        return zip(self._entries, [0, *self._ends], self._ends, strict=False)

    def _forget(self, end: int) -> None:
        """Drop bytes up to `end`; a token that reaches beyond it stays, as told."""
        rest = [
            (entry if first >= end else _TOLD, last - end)
            for entry, first, last in self._spans()
            if last > end
        ]
        self._entries = [entry for entry, _ in rest]
        self._ends = [last for _, last in rest]
        del self._bytes[:end]


_TOLD: Json = {}


def in_item(entries: Sequence[Json]) -> list[Json]:
    """In the shape that an output_text part has."""
    return [
        {
            "token": entry["token"],
            "bytes": _bytes_of(entry),
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": top["token"], "bytes": _bytes_of(top), "logprob": top["logprob"]}
                for top in entry.get("top_logprobs") or ()
            ],
        }
        for entry in entries
    ]


def in_event(entries: Sequence[Json]) -> list[Json]:
    """In the shape that events of text have."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"]}
                for top in entry.get("top_logprobs") or ()
            ],
        }
        for entry in entries
    ]


def entries_of(choice: Json) -> list[Json]:
    told: Any = (choice.get("logprobs") or {}).get("content")
    return told or []


def _bytes_of(entry: Json) -> list[int]:
    told = entry.get("bytes")
    return list(entry["token"].encode()) if told is None else told
