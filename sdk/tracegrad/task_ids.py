"""What a task is called when its caller did not say: stable names from what was asked.

The same function with the same arguments is the same task, in this process and in the next, so
that several attempts at it form a group. Hence no memory address and no set order may show.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping

from tracegrad.serializer import SerializedValue, Serializer, SerializerLimits

_log = logging.getLogger("tracegrad")

# What distinguishes tasks. By count, not by time: a busy machine must not change it.
IDENTITY_LIMITS = SerializerLimits(values=2_000, items=2_000, text=500_000, characters=500_000)

MAX_TASK_ID_BYTES = 2_000  # bytes
# A state's key as it is sent in a header and stored: at most 128 printable characters.
_STATE_KEY = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?")

_sorted_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

_said: set[str] = set()  # functions whose arguments were found too large


def task_and_input(
    function: Callable[..., object], arguments: Mapping[str, object]
) -> tuple[str, SerializedValue]:
    """A call's task id, and its arguments as JSON for people to read.

    The id is 16 hex characters from the function's qualified name and its arguments, as far as
    `IDENTITY` reaches: calls that differ only beyond it are one task, and a warning says so once.
    """
    reprs: dict[int, tuple[object, str]] = {}
    walk = Serializer(IDENTITY_LIMITS, reprs)
    plain = walk.serialize(arguments)
    asked = _sorted_json(plain)
    name = f"{_module(function)}.{qualified_name(function)}"
    if walk.truncated and name not in _said:
        _said.add(name)
        _log.warning(
            "the arguments of %s are too large to be told apart in full: calls that differ only "
            "beyond %d values or %d characters count as one task; give @trace(task=...)",
            name,
            IDENTITY_LIMITS.values,
            IDENTITY_LIMITS.characters,
        )
    digest = hashlib.sha256(f"{name}({asked})".encode("utf-8", "replace")).hexdigest()
    if walk.is_small:
        return digest[:16], SerializedValue(plain)
    shown = Serializer(reprs=reprs)
    plain = shown.serialize(arguments)
    return digest[:16], SerializedValue(plain, shown.truncated)


def bounded_task_id(task: str) -> str:
    """`task`; one that is too long for the store's index by its beginning and a digest."""
    data = task.encode("utf-8", "replace")
    if len(data) <= MAX_TASK_ID_BYTES:
        return task
    head = data[:200].decode("utf-8", "ignore")
    return f"{head}…{hashlib.sha256(data).hexdigest()[:32]}"


def state_key(state: object) -> str | None:
    """The key of an environment's state; equal states have equal ones, in every process.

    A text of at most 128 printable ASCII characters without white space around it is its own key.
    Of anything else it is a digest: of the text, or of what the object is as JSON, with sorted
    keys. None: `state` is None, or goes beyond `IDENTITY`, where unequal ones look alike.
    """
    if state is None or (type(state) is str and _STATE_KEY.fullmatch(state)):
        return state
    walk = Serializer(IDENTITY_LIMITS)
    text = json.dumps(walk.serialize(state), sort_keys=True)
    if walk.truncated:
        return None
    data = text.encode("utf-8", "surrogatepass")
    return f"blake2b:{hashlib.blake2b(data, digest_size=16).hexdigest()}"


def qualified_name(function: Callable[..., object]) -> str:
    """The name as a person would write it: `Agent.solve`, without the scopes around it."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _module(function: Callable[..., object]) -> str:
    """The module's name, also for the file that was started as the main program."""
    name = str(getattr(function, "__module__", ""))
    if name != "__main__":
        return name
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    return os.path.splitext(os.path.basename(file))[0] if file else name
