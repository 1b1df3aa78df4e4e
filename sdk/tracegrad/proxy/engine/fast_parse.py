"""Cuts the heavy parts out of an engine's answer before it is parsed.

Of the answer to a prompt of 8k tokens nine bytes in ten are token ids and log-probabilities. They
are found by their keys in the JSON text and read by what reads such lists fastest; what is left
is a few kilobytes for an ordinary parser. A key that is looked for cannot stand inside a JSON
string: its quotes would be escaped there. That a list was cut where it belongs shows in the rest,
which must have null in its place.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from tracegrad.events import token_id_array
from tracegrad.proxy.engine.prompt_texts import prompt_texts

_PROMPT = b'"prompt_token_ids":['
_TOKENS = b'"token_ids":['
_KEY = b'"logprobs":'
_LOGPROBS = _KEY + b'{"content":['
# The last entry of a list without alternatives, its list and the object around it.
_LAST = b'"top_logprobs":[]}]}'
# Right behind the token ids, as a text; null where there are none.
_ROUTES = b',"routed_experts":"'
_COMMA = ord(",")


class LogprobEntry(msgspec.Struct, gc=False):
    logprob: float


_entries = msgspec.json.Decoder(list[LogprobEntry])


class TokenIdText(NamedTuple):
    values: array[int]
    text: bytes  # the list as it was written


class ExtractedChoice(NamedTuple):
    tokens: TokenIdText
    logprobs: list[float]
    logprobs_text: bytes  # the object that holds them
    routed_experts: bytes | None  # a JSON text of base64


@dataclass(frozen=True, slots=True)
class ExtractedTokens:
    """`rest` is the answer with null in place of what was cut out."""

    rest: bytes
    prompt: TokenIdText
    choices: list[ExtractedChoice]


def extract_tokens(raw: bytes, choices: int) -> ExtractedTokens | None:
    """None for an answer that is not written as vLLM writes one: read it as any other JSON."""
    rest: list[bytes] = []
    found: list[ExtractedChoice] = []
    at = 0
    try:
        for _ in range(choices):
            start = raw.index(_LOGPROBS, at) + len(_KEY)
            end = raw.index(_LAST, start) + len(_LAST)
            rest += (raw[at:start], b"null")
            shown = raw[start:end]
            entries = _entries.decode(shown[len(_LOGPROBS) - len(_KEY) - 1 : -1])
            tokens, at = _cut_ids(raw, end, rest)
            routes, at = _cut_routes(raw, at, rest)
            found.append(
                ExtractedChoice(tokens, [entry.logprob for entry in entries], shown, routes)
            )
        prompt, at = _cut_prompt(raw, at, rest)
    except (ValueError, msgspec.DecodeError):
        return None
    rest.append(raw[at:])
    return ExtractedTokens(b"".join(rest), prompt, found)


def extract_prompt(raw: bytes) -> tuple[bytes, TokenIdText | None]:
    """Only the prompt's ids, as in the first chunk of a stream; None where there are none."""
    rest: list[bytes] = []
    try:
        prompt, at = _cut_prompt(raw, 0, rest)
    except ValueError:
        return raw, None
    return b"".join((*rest, raw[at:])), prompt


def _cut_ids(raw: bytes, at: int, rest: list[bytes]) -> tuple[TokenIdText, int]:
    text, at = _cut_list(raw, _TOKENS, at, rest)
    return TokenIdText(parse_token_ids(text[1:-1]), text), at


def _cut_prompt(raw: bytes, at: int, rest: list[bytes]) -> tuple[TokenIdText, int]:
    text, at = _cut_list(raw, _PROMPT, at, rest)
    if (ids := prompt_texts.get(text)) is None:
        ids = parse_token_ids(text[1:-1])
        prompt_texts.add(text, ids)
    return TokenIdText(ids, text), at


def _cut_list(raw: bytes, key: bytes, at: int, rest: list[bytes]) -> tuple[bytes, int]:
    """The list under `key`, and where it ends; `rest` gets what comes before it, and null."""
    start = raw.index(key, at) + len(key) - 1
    end = raw.index(b"]", start) + 1
    rest += (raw[at:start], b"null")
    return raw[start:end], end


def _cut_routes(raw: bytes, at: int, rest: list[bytes]) -> tuple[bytes | None, int]:
    if not raw.startswith(_ROUTES, at):
        return None, at
    start = at + len(_ROUTES) - 1
    end = raw.index(b'"', start + 1) + 1
    rest += (raw[at:start], b"null")
    return raw[start:end], end


def parse_token_ids(text: bytes) -> array[int]:
    """Token ids, written with commas between. Raises ValueError for anything else.

    NumPy reads ten thousand numbers twice as fast as a JSON parser and `array` together.
    """
    ids = token_id_array()
    if not text:
        return ids
    values = np.fromstring(text, dtype=np.int64, sep=",")
    # By older NumPys what is no integer only ends the reading early.
    commas = np.count_nonzero(np.frombuffer(text, dtype=np.uint8) == _COMMA)
    # Of a negative one all bits above the 31st are set.
    if len(values) != commas + 1 or int(np.bitwise_or.reduce(values)) >> 31:
        raise ValueError("token ids are integers from 0 to 2**31 - 1")
    ids.frombytes(values.astype(np.int32).tobytes())
    return ids
