"""Prompts of late, by their token ids as JSON text: what is known is not read again.

An engine answers with the ids of each prompt. Those of a turn that continues another are the very
ids that it was given, and attempts at one task begin with the same prompt. To find eight thousand
ids by their text takes a tenth of the time that reading them takes.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict

MOST_BYTES = 16 << 20  # of texts and ids, about 200 prompts of 8k tokens
LARGEST_BYTES = MOST_BYTES // 8  # of one
SMALLEST_BYTES = 1024  # of a text that is worth a place


class PromptTexts:
    """Safe to use from many threads. The arrays are shared: nobody may change them."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self.size = 0  # bytes

    def get(self, text: bytes) -> array[int] | None:
        """`text` is a JSON array of integers without spaces."""
        with self._lock:
            ids = self._known.get(text)
            if ids is not None:
                self._known.move_to_end(text)
            return ids

    def add(self, text: bytes, ids: array[int]) -> None:
        size = _size(text, ids)
        if len(text) < SMALLEST_BYTES or size > LARGEST_BYTES:
            return
        with self._lock:
            if text in self._known:
                return
            self._known[text] = ids
            self.size += size
            while self.size > self._most_bytes:
                self.size -= _size(*self._known.popitem(last=False))


def _size(text: bytes, ids: array[int]) -> int:
    return len(text) + len(ids) * ids.itemsize


# Of this process: its engines tokenize alike, and a text stands for the same ids everywhere.
prompt_texts = PromptTexts()
