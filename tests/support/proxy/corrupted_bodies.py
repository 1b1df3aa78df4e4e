"""Request bodies with one thing wrong, for dialects that must name what it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]
Path = tuple[str | int, ...]

DEEP: Any = []
for _ in range(300):  # deeper than JSON is written here
    DEEP = [DEEP]

_WORDS = ["", "user", "model", "auto", "text", "function", "custom", "message", "look", "é\u2028"]
_NAMES = ["type", "name", "tools", "text", "content", "format", "x"]
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**63, 2**64, 10**30, -(10**30), 1e300, 0.5, -0.0]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from([*_WORDS, "\x00", "{}", "a" * 2000]),
    st.sampled_from([[], {}, [[]], [None], [{}], {"": None}, [1, "a"], {"type": "text"}, DEEP]),
    st.dictionaries(st.sampled_from(_NAMES), st.sampled_from([None, 1, *_WORDS]), max_size=3),
    st.dictionaries(st.text(max_size=5).filter(str.isascii), st.integers(), max_size=3),
)


def json_paths(body: Any, path: Path = ()) -> Iterator[Path]:
    """Where something stands in a body, the body itself left out."""
    items: Any = ()
    if isinstance(body, dict):
        items = body.items()
    elif isinstance(body, list):
        items = enumerate(body)
    for key, value in items:
        yield (*path, key)
        yield from json_paths(value, (*path, key))


def _own(value: Any) -> Any:
    """A copy: the next deed may change what this one put there."""
    return json.loads(json.dumps(value))


@st.composite
def corrupted(draw: st.DrawFn, bodies: list[Json]) -> Any:
    """One of the bodies with up to three things replaced, taken away or added."""
    body = _own(draw(st.sampled_from(bodies)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(json_paths(body)) or [("model",)]))
        at = body
        for key in path[:-1]:
            at = at[key]
        deed = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if deed == "remove":
            del at[path[-1]]
        elif deed == "replace":
            at[path[-1]] = _own(draw(JUNK))
        elif isinstance(at, dict):
            at[draw(st.text(max_size=8).filter(str.isascii))] = _own(draw(JUNK))
        else:
            at.insert(path[-1], _own(draw(JUNK)))
        if not isinstance(body, dict) or not body:
            break
    return body
