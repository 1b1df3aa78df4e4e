"""Prompts of late, by their token ids as JSON text: what is known is not read again.

An engine answers with the ids of each prompt. Those of a turn that continues another are the very
ids that it was given, and attempts at one task begin with the same prompt. To find eight thousand
ids by their text takes a tenth of the time that reading them takes.
"""

from __future__ import annotations

from array import array

from tracegrad.sized_cache import SizedCache

MOST_BYTES = 16 << 20  # of texts and ids, about 200 prompts of 8k tokens
LARGEST_BYTES = MOST_BYTES // 8  # of one
SMALLEST_BYTES = 1024  # of a text that is worth a place


class PromptTexts:
    """Safe to use from many threads. The arrays are shared: nobody may change them."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._known: SizedCache[array[int]] = SizedCache(
            most_bytes, smallest=SMALLEST_BYTES, largest=LARGEST_BYTES
        )

    @property
    def size(self) -> int:
        """In bytes."""
        return self._known.size

    def get(self, text: bytes) -> array[int] | None:
        """`text` is a JSON array of integers without spaces."""
        return self._known.get(text)

    def add(self, text: bytes, ids: array[int]) -> None:
        self._known.add(text, ids, len(ids) * ids.itemsize)


# Of this process: its engines tokenize alike, and a text stands for the same ids everywhere.
prompt_texts = PromptTexts()
