"""A model's tokenizer by the `tokenizers` library alone: exact ids, exact text, nothing added."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer as Core

from tracegrad.chat.tokenizer_roundtrip import found_anywhere, roundtrip_of
from tracegrad.sized_cache import SizedCache

# Texts of long prompts: each turn of a rollout is held against how it began, and attempts at one
# task begin alike.
DECODED_BYTES = 8 << 20
_LONGEST_DECODED = 1 << 20
_SHORTEST_DECODED = 1 << 10  # of the ids: 256 of them


class UnencodableText(ValueError):
    """A string that no tokenizer can read."""


class Tokenizer:
    """To be shared between threads; `core` must not be changed afterwards."""

    def __init__(self, core: Core) -> None:
        core.no_padding()
        core.no_truncation()
        self._core = core
        added = core.get_added_tokens_decoder()
        contents = [token.content for token in added.values()]
        self._added = {id_: token.content for id_, token in added.items()}
        self._longest_first = sorted(added, key=lambda id_: -len(added[id_].content))
        self._anywhere = {
            id_ for id_, token in added.items() if found_anywhere(token, contents, core)
        }
        self._reading = roundtrip_of(core)
        self._decoded: SizedCache[str] = SizedCache(
            DECODED_BYTES, smallest=_SHORTEST_DECODED, largest=_LONGEST_DECODED
        )

    def encode(self, text: str) -> array[int]:
        """Ids without special tokens that the text does not spell out. Raises UnencodableText."""
        try:
            return array("i", self._core.encode(text, add_special_tokens=False).ids)
        except TypeError as error:  # what the library makes of a lone surrogate
            raise UnencodableText("the text holds half a character (a lone surrogate)") from error

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text with special tokens in it, or without, as engines report replies. Ids that stand
        for nothing leave nothing."""
        if not isinstance(ids, array) or skip_special:
            text: str = self._core.decode(list(ids), skip_special_tokens=skip_special)
            return text
        key = ids.tobytes()
        if (known := self._decoded.get(key)) is not None:
            return known
        text = self._core.decode(ids.tolist(), skip_special_tokens=False)
        self._decoded.add(key, text, sys.getsizeof(text))
        return text

    def roundtrip(self, text: str) -> str:
        """`decode(encode(text))`: the text itself for most tokenizers, less than that where one
        strips white space beside special tokens, say."""
        read = self._reading(text)
        return self.decode(self.encode(text)) if read is None else read

    def added_token(self, token_id: int) -> str | None:
        """The text of a token that is matched before all others (special ones and the like)."""
        return self._added.get(token_id)

    def added_token_at_start(self, text: str) -> int | None:
        """The added token that the text begins with, the longest where several do."""
        starts = (id_ for id_ in self._longest_first if text.startswith(self._added[id_]))
        return next(starts, None)

    def first_added_token(self, text: str) -> tuple[int, str] | None:
        """Where the first text of an added token stands, and that text, the longest there."""
        if not self._added:
            return None
        found = self._any_added.search(text)
        return (found.start(), found.group()) if found is not None else None

    @cached_property
    def _any_added(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(self._added[id_]) for id_ in self._longest_first))

    def encode_tail(self, tail: str, whole: str) -> array[int] | None:
        """The ids that `tail` has at the end of `encode(whole)`, without encoding what is before.

        `as_read(whole)` ends with `tail`, and `tail` begins with an added token. The text is cut
        at such tokens before anything else is done with it, and each piece is tokenised by
        itself: what is on the left of one changes nothing on its right, provided that
        it is found there at all (`found_anywhere`). The window is thus the tail itself. Without
        that proof the whole text is encoded and its end compared. None: there are no such ids.
        """
        if self._reading(whole) is not None:
            ids = self.encode(tail)
            if ids and ids[0] in self._anywhere:
                return ids
        first = self.added_token_at_start(tail)
        return None if first is None else self._end_of(self.encode(whole), tail, first)

    def _end_of(self, ids: array[int], tail: str, first: int) -> array[int] | None:
        starts = [at for at, id_ in enumerate(ids) if id_ == first]
        count = tail.count(self._added[first])
        if len(starts) < count:
            return None
        end = ids[starts[-count] :]
        return end if self.decode(end) == tail else None
