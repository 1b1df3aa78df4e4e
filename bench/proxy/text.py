"""Text and token ids as a coding agent's calls have them, the same in every process.

The text is the documentation and the source of Python's own standard library, cut into pieces
about as long as those of real tokenizers (four characters). As there, frequent pieces have small
ids and rare ones are strewn over a large vocabulary: what a store makes of such ids and such
text, in bytes, is then close to what it makes of real ones.
"""

from __future__ import annotations

import importlib.util
import random
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from pydoc_data import topics
from typing import Any

# Qwen's tokenizers have about this many ids below their special ones.
VOCABULARY = 151_643
END = VOCABULARY
ROLES = {
    name: VOCABULARY + 1 + at for at, name in enumerate(("system", "user", "assistant", "tool"))
}

_PIECE = re.compile(r" ?[A-Za-z]+| ?[0-9]{1,3}|\s+| ?[^\sA-Za-z0-9]+")
_MODULES = (
    "argparse",
    "ast",
    "configparser",
    "datetime",
    "decimal",
    "difflib",
    "doctest",
    "fractions",
    "inspect",
    "ipaddress",
    "mailbox",
    "optparse",
    "pdb",
    "pickle",
    "smtplib",
    "statistics",
    "subprocess",
    "tarfile",
    "threading",
    "typing",
    "unittest.mock",
    "zipfile",
)
# An agent's prompt is made of many short things: instructions, tools, pieces of files.
_PASSAGE = 256
# How much faster ids grow than ranks: the rarer, the more of its kind are not in this corpus.
_SPREAD = 1.15


def pieces(text: str) -> list[str]:
    return _PIECE.findall(text)


def encode(text: str) -> list[int]:
    known = _vocabulary()
    return [known.get(piece) or _strewn(piece, VOCABULARY) for piece in pieces(text)]


def render(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The chat template: each message behind its role and before an end, then who is to speak.

    A conversation that goes on extends the tokens of its earlier turns.
    """
    ids: list[int] = []
    for message in messages:
        ids += [ROLES[message["role"]], *encode(message.get("content") or ""), END]
    return [*ids, ROLES["assistant"]]


def passage(tokens: int, seed: str) -> list[str]:
    """So many pieces, from places in the corpus that `seed` decides."""
    chance = random.Random(seed)
    corpus = _corpus()
    found: list[str] = []
    while len(found) < tokens:
        start = chance.randrange(len(corpus) - _PASSAGE)
        found += corpus[start : start + _PASSAGE]
    return found[:tokens]


@cache
def _vocabulary() -> dict[str, int]:
    """Ids from 256 on, by rank and chance. Two pieces may share one: nobody reads ids back."""
    ranked = [piece for piece, _ in Counter(_corpus()).most_common()]
    spread = (VOCABULARY - 256) / 2 / len(ranked) ** _SPREAD
    return {
        piece: 256 + int(rank**_SPREAD * spread * (0.5 + _strewn(piece, 1500) / 1000))
        for rank, piece in enumerate(ranked)
    }


def _strewn(piece: str, below: int) -> int:
    return zlib.crc32(piece.encode()) % below


@cache
def _corpus() -> list[str]:
    texts = [topics.topics[name] for name in sorted(topics.topics)]
    texts += [_source(module) for module in _MODULES]
    return pieces("\n\n".join(texts))


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin).read_text(encoding="utf-8")
