"""The text of each token by itself, such that the pieces together are the text of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tracegrad.chat.model import load_chat_format
from tracegrad.chat.tokenizer import Tokenizer

_HALF = "\ufffd"  # what a tokenizer makes of a part of a character
_LONGEST = 8  # tokens of one character


def token_reader(folder: Path) -> Callable[[Sequence[int]], list[str]]:
    """`token_pieces` of the tokenizer in a model's folder. Raises NotReproducible."""
    return partial(token_pieces, load_chat_format(folder).tokenizer)


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """One piece a token; of a character of several tokens the last one has it, and those before
    it are empty. A space that tokenizers leave out at the beginning of a text stays in its token.
    """
    pieces: list[str] = []
    waiting: list[int] = []
    before: list[int] = []  # the token before those that wait
    for token in ids:
        waiting.append(token)
        prefix = tokenizer.decode(before) if before else ""
        text = tokenizer.decode([*before, *waiting])
        text = text[len(prefix) :] if text.startswith(prefix) else tokenizer.decode(waiting)
        if text.endswith(_HALF) and len(waiting) < _LONGEST:
            pieces.append("")
            continue
        pieces.append(text)
        before, waiting = [token], []
    if waiting and pieces:
        pieces[-1] = tokenizer.decode(waiting)
    return pieces
