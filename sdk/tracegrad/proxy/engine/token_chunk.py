"""Chunks of a stream that say some words and their tokens, and nothing else, as vLLM writes them.

Most chunks of most streams are of this kind, one a token. They differ only behind their head (id,
model, index), which is learnt from a chunk that was read as JSON. What follows is matched, goes on
to the client as it was written, and is converted for many chunks at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, Self

import orjson

from tracegrad.chat.call import VisibleFields
from tracegrad.events import Json

# Chunks that are kept as bytes, at most.
MOST_PENDING = 64

_DELTA = b'"delta":{'
# Without `\u`, which not all of is text: such a chunk is read as JSON.
_STRING = rb'"[^"\\\x00-\x1f]*(?:\\["\\/bfnrt][^"\\\x00-\x1f]*)*"'
_NUMBER = rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_ENTRY = rb'\{"token":%b,"logprob":(%b),"bytes":(?:\[[0-9,]*\]|null),"top_logprobs":\[\]\}' % (
    _STRING,
    _NUMBER,
)
_REST = re.compile(
    rb'"(content|reasoning)":(%b)\},"logprobs":(\{"content":\[%b(?:,%b)*\]\})'
    rb',"finish_reason":null(,"token_ids":\[([0-9]+(?:,[0-9]+)*)\])\}\]\}\n\n'
    % (_STRING, _ENTRY, _ENTRY)
)
# The same of one token, as most are, to the end of the piece of HTTP's chunked encoding that it is.
_FRAME = re.compile(
    rb'"(content|reasoning)":(%b)\},"logprobs":(\{"content":\[%b\]\})'
    rb',"finish_reason":null(,"token_ids":\[([0-9]+)\])\}\]\}\n\n\r\n' % (_STRING, _ENTRY)
)
_SIZE_DIGITS = 8  # of such a piece, at most
# A key cannot stand inside a JSON string: its quotes would be escaped there.
_LOGPROB = re.compile(rb'"logprob":(%b)' % _NUMBER)


class TokenRun(NamedTuple):
    """What some chunks said, in order. `unsaid`: how many of the tokens, the last ones, came
    without a word: a letter of theirs is not whole yet. `thinks`: the last word was a thought's."""

    content: str
    reasoning: str
    token_ids: list[int]
    logprobs: list[float]
    unsaid: int = 0
    thinks: bool = False


class TokenChunkReader:
    """Reads the chunks of one choice, the one at `index`."""

    def __init__(self, head: bytes, index: int, shown: VisibleFields) -> None:
        self.index = index
        self._head = head
        self._shown = shown
        self._shows_all = shown.ids and shown.logprobs
        # One of each a chunk that `take` has not given yet.
        self._kinds: list[bytes] = []
        self._texts: list[bytes] = []  # JSON strings
        self.token_ids: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._frames: list[re.Match[bytes]] = []  # behind those, what is not taken apart yet

    @property
    def pending(self) -> int:
        """Chunks that `take` has not given yet."""
        return len(self.token_ids) + len(self._frames)

    @classmethod
    def learn(cls, raw: bytes, shown: VisibleFields) -> Self | None:
        """From a chunk that is JSON. None: there is no such head in it."""
        head = raw[: raw.find(_DELTA) + len(_DELTA)]
        try:
            # What stands before the delta, and nothing else.
            chunk = orjson.loads(head + b"}}]}")
            (choice,) = chunk["choices"]
        except (ValueError, TypeError, KeyError):
            return None
        if not isinstance(choice, Mapping) or choice.keys() != {"index", "delta"}:
            return None
        if chunk.keys() & {"usage", "error", "prompt_token_ids"}:
            return None
        return cls(b"data: " + head, choice["index"], shown)

    def read(self, data: bytes, out: list[Json | bytes]) -> int:
        """Reads the events that `data` begins with as far as they are such chunks: `out` gets what
        the client may see of them. Returns their bytes; what follows is to be read as JSON."""
        self._take_apart()
        at = 0
        while data.startswith(self._head, at):
            found = _REST.match(data, at + len(self._head))
            if found is None or not _is_utf8(found):
                break
            kind, text, logprobs, first, other, tokens, ids = found.groups()
            values = (first,) if other is None else _LOGPROB.findall(logprobs)
            if len(values) != ids.count(b",") + 1:
                break  # chunks are joined: one without a value would shift those behind it
            self._kinds.append(kind)
            self._texts.append(text)
            self.token_ids.append(ids)
            self._logprobs += values
            if not self._shows_all:
                out.append(
                    b'%b},"logprobs":%b,"finish_reason":null%b}]}\n\n'
                    % (
                        data[at : found.end(2)],
                        logprobs if self._shown.logprobs else b"null",
                        tokens if self._shown.ids else b"",
                    )
                )
            at = found.end()
        if self._shows_all and at:
            out.append(data if at == len(data) else data[:at])
        return at

    def read_frames(self, data: bytes) -> bytes | None:
        """As `read`, of events that are a piece of HTTP's chunked encoding each: what the client
        may see of them, as such pieces. None, and nothing is read: `data` has anything else in it.
        """
        found: list[re.Match[bytes]] = []
        at, size, head = 0, len(data), self._head
        while at < size:
            start = data.find(b"\r\n", at, at + _SIZE_DIGITS + 2) + 2
            if start < 2 or not data.startswith(head, start):
                return None
            chunk = _FRAME.match(data, start + len(head))
            # Of the right size it is one piece, whole, whatever came before it.
            if chunk is None or data[at : start - 2].lower() != b"%x" % (chunk.end() - start - 2):
                return None
            found.append(chunk)
            at = chunk.end()
        if not data.isascii() and not all(map(_is_utf8, found)):
            return None
        self._frames += found
        return data if self._shows_all else b"".join(map(self._shown_frame, found))

    def _shown_frame(self, chunk: re.Match[bytes]) -> bytes:
        shown = b'%b%b},"logprobs":%b,"finish_reason":null%b}]}\n\n' % (
            self._head,
            chunk.string[chunk.pos : chunk.end(2)],
            chunk[3] if self._shown.logprobs else b"null",
            chunk[5] if self._shown.ids else b"",
        )
        return b"%x\r\n%b\r\n" % (len(shown), shown)

    def _take_apart(self) -> None:
        for chunk in self._frames:
            kind, text, value, ids = chunk.group(1, 2, 4, 6)
            self._kinds.append(kind)
            self._texts.append(text)
            self.token_ids.append(ids)
            self._logprobs.append(value)
        self._frames.clear()

    def take(self) -> TokenRun:
        """All that is pending."""
        self._take_apart()
        unsaid, thinks = self._end()
        run = TokenRun(
            self._said(b"content"),
            self._said(b"reasoning"),
            orjson.loads(b"[%b]" % b",".join(self.token_ids)),
            [float(each) for each in self._logprobs],
            unsaid,
            thinks,
        )
        for pending in (self._kinds, self._texts, self.token_ids, self._logprobs):
            pending.clear()
        return run

    def _said(self, kind: bytes) -> str:
        pairs = zip(self._kinds, self._texts, strict=True)
        return _joined([text for each, text in pairs if each == kind])

    def _end(self) -> tuple[int, bool]:
        """`unsaid` and `thinks` of what is pending."""
        wordless = 0
        for at in range(len(self._texts) - 1, -1, -1):
            if self._texts[at] != b'""':
                return wordless, self._kinds[at] == b"reasoning"
            wordless += self.token_ids[at].count(b",") + 1
        return wordless, False


def _is_utf8(found: re.Match[bytes]) -> bool:
    text = found[0]
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _joined(texts: list[bytes]) -> str:
    return "".join(orjson.loads(b"[%b]" % b",".join(texts)))
