"""The process that a user's function runs in: `python -m ... FUNCTION NAME REPLY_FD`.

FUNCTION is an import path, or a built-in term as JSON. What comes on stdin is ours: a pickled
rollout behind its length. What goes out is what a user's function made of it, so it is JSON, on a
descriptor of its own: whatever the function prints is not in it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import pickle
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tracegrad.events import Json
from tracegrad.import_path import import_part
from tracegrad_trainer.rewards import terms
from tracegrad_trainer.rewards.result import FORMAT, LENGTH, NoScore, read_score
from tracegrad_trainer.rewards.rollout import ScoredRollout

_LONGEST_ERROR = 500
HEAD = struct.Struct("!Q")

Function = Callable[[ScoredRollout], Any]
_TERMS: dict[str, Callable[..., float]] = {LENGTH: terms.length, FORMAT: terms.matches_format}


def load(described: str) -> tuple[Function, str]:
    """The function, and the digest of its source. Raises ValueError."""
    if not described.startswith("{"):
        function = import_part("function", described)
        return function, _source_digest(function, described)
    term = json.loads(described)
    digest = hashlib.sha256(described.encode()).hexdigest()
    return partial(_TERMS[term.pop("term")], **term), digest


def _source_digest(function: Function, path: str) -> str:
    """Of the whole file that it is in: what it calls there is a part of it."""
    source = path.encode()
    with suppress(TypeError, OSError):
        source += b"\n" + Path(inspect.getfile(inspect.unwrap(function))).read_bytes()
    return hashlib.sha256(source).hexdigest()


def answer(function: Function, name: str, rollout: ScoredRollout) -> Json:
    """What came of one rollout."""
    try:
        return read_score(name, function(rollout)).as_json()
    except NoScore as error:
        return {"error": str(error), "final": True}
    except Exception as error:
        return {"error": f"{name} raised {describe_error(error)}"}


def describe_error(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # an exception of the user's, whose text is none
        text = type(error).__name__
    return " ".join(text.split())[:_LONGEST_ERROR]


def serve(function: Function, name: str, asked: BinaryIO, reply: Callable[[Json], None]) -> None:
    """Until nothing is asked any more."""
    while head := asked.read(HEAD.size):
        (size,) = HEAD.unpack(head)
        reply(answer(function, name, pickle.loads(asked.read(size))))


def main(arguments: list[str]) -> int:
    described, name, fd = arguments
    # Of its own, so that a function which reads stdin takes nothing of ours.
    asked = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    replies = os.fdopen(int(fd), "w", encoding="utf-8")
    os.set_inheritable(replies.fileno(), False)

    def reply(said: Json) -> None:
        replies.write(json.dumps(said, allow_nan=False) + "\n")
        replies.flush()

    sys.path.append(str(Path.cwd()))  # behind all else: no file there hides a library
    try:
        function, digest = load(described)
    except (SystemExit, Exception) as error:  # a module may do anything when it is imported
        reply({"error": describe_error(error) if not isinstance(error, ValueError) else str(error)})
        return 1
    reply({"digest": digest})
    serve(function, name, asked, reply)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
