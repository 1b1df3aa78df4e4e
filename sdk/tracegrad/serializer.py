"""Values of an agent's own as JSON, in bounded time and size, whatever they are.

What an agent passes, returns or raises may be anything: integers of 5,000 digits, lists of a
gigabyte, mappings whose `items()` fails, lone surrogates, cycles. All of it is made JSON where the
event is put, so that nothing after that can fail on a value. The walk visits a bounded number of
values and copies a bounded number of characters; what is left out says so in its place. An error
in a method of the agent's own class is contained.

What cannot be bounded here is one call of an agent's own `__repr__` or `__iter__`: it runs in the
caller, like the rest of the agent's code.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import islice
from types import MethodType, SimpleNamespace
from typing import Any

from tracegrad.signal_errors import is_of_signal_handler

LONGEST_TEXT = 100_000  # characters of one text
LONGEST_KEY = 1_000  # of a mapping's key
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_JSON_INTEGER = 1 << 63  # larger ones are text: most readers of JSON have 64 bits
_SCALARS = (str, int, float, bytes, bytearray, type(None))
_ITEMS_AFTER_CUT = "…"


@dataclasses.dataclass(frozen=True, slots=True)
class SerializerLimits:
    """How much of a value is kept.

    Args:
        values: visited in all.
        items: of one list or mapping.
        text: characters of one text.
        characters: of all texts together.
        depth: of nesting.
        reprs: calls of `__repr__` of classes that are not known here.
    """

    values: int = 1_500
    items: int = 500
    text: int = LONGEST_TEXT
    characters: int = 400_000
    depth: int = 8
    reprs: int = 100


DISPLAY_LIMITS = SerializerLimits()


@dataclasses.dataclass(frozen=True, slots=True)
class SerializedValue:
    """What a walk gave; a later walk takes it as it is."""

    value: Any
    truncated: bool = False


class Serializer:
    """One walk over one value. `truncated`: something was left out.

    `reprs` may be shared by walks over the same value, so that each object is asked once.
    """

    def __init__(
        self,
        limits: SerializerLimits = DISPLAY_LIMITS,
        reprs: dict[int, tuple[object, str]] | None = None,
    ) -> None:
        self._limits = limits
        self._values = limits.values
        self._characters = limits.characters
        self._reprs = reprs if reprs is not None else {}
        self._reprs_left = limits.reprs
        self._broken: set[type] = set()  # classes whose `__repr__` failed: not asked again
        self.truncated = False

    @property
    def is_small(self) -> bool:
        """Whether what was walked is far within all limits that are used here: a walk with others
        of them would give the same, however it shares them out."""
        taken = self._limits.values - self._values, self._limits.characters - self._characters
        return not self.truncated and taken[0] <= 10 and taken[1] <= 2_000

    def serialize(self, value: object, depth: int = 0) -> Any:
        """The value as `json.dumps` takes it: str, int, float, bool, None, dict and list.

        Sets are sorted, memory addresses removed. Never raises an `Exception`.
        """
        self._values -= 1
        if type(value) is str:
            return self.text(value)
        if type(value) is float and math.isfinite(value):
            return value
        try:
            return self._plain(value, depth)
        except Exception as error:  # of the agent's own class; its call is not to fail for it
            if is_of_signal_handler(error):
                raise
            return self.text(_opaque(value))

    def _plain(self, value: object, depth: int) -> Any:
        if value is None or value is True or value is False:
            return value
        if type(value) is SerializedValue:
            self.truncated |= value.truncated
            return value.value
        if isinstance(value, str):
            return self.text(str.__str__(value))
        if isinstance(value, int):
            return self._integer(int.__index__(value))
        if isinstance(value, float):
            number = float.__float__(value)
            return number if math.isfinite(number) else repr(number)
        if isinstance(value, bytes | bytearray | memoryview):
            return self._bytes(value)
        if depth < self._limits.depth and self._values > 0:
            if isinstance(value, Mapping):
                return self._mapping(value.items(), _length(value), depth)
            if isinstance(value, AbstractSet):
                return self._set(value, depth)
            if isinstance(value, Sequence | deque) and not isinstance(value, range):
                return self._list(value, _length(value), depth)
            if (fields := _fields(value)) is not None:
                named = [("__class__", type(value).__qualname__), *islice(fields, 1_000)]
                return self._mapping(named, len(named), depth)
        elif not isinstance(value, _SCALARS) and _is_container(value):
            self.truncated = True
            return self.text(_opaque(value))
        return self.text(self._repr(value))

    def text(self, text: str) -> str:
        length = len(text)
        if length <= self._limits.text and length <= self._characters:
            self._characters -= length
            return text
        most = max(0, min(self._limits.text, self._characters))
        self._characters -= most
        self.truncated = True
        return f"{text[:most]}… ({len(text) - most} more characters)"

    def _integer(self, number: int) -> int | str:
        if -_JSON_INTEGER <= number < _JSON_INTEGER:
            return number
        bits = number.bit_length()
        if bits <= 2_000:  # 602 digits: below every limit that the interpreter may set
            return str(number)
        most = 4 * max(0, min(self._limits.text, self._characters) - 64)
        if bits > most:  # the leading digits, and how many there are
            self.truncated = True
            number = (abs(number) >> (bits - most)) * (-1 if number < 0 else 1)
            return self.text(f"{number:#x}… ({bits} bits)")
        return self.text(f"{number:#x}")

    def _bytes(self, value: bytes | bytearray | memoryview) -> str:
        most = max(0, min(self._limits.text, self._characters) - 64) // 4  # "\xff" is four
        whole = memoryview(value)
        length = whole.nbytes
        if length <= most:
            return self.text(repr(whole.tobytes()))
        self.truncated = True
        head = whole.cast("B")[:most] if whole.contiguous else b""
        return self.text(f"{bytes(head)!r}… ({length - most} more bytes)")

    def _list(self, items: Iterable[object], length: int | None, depth: int) -> list[Any]:
        kept = [self._share(item, depth, left) for item, left in self._some(items, length)]
        if length is None or length > len(kept):
            self.truncated = True
            kept.append(f"{_ITEMS_AFTER_CUT} ({_more(length, len(kept))})")
        return kept

    def _set(self, value: AbstractSet[object], depth: int) -> list[Any]:
        length = _length(value)
        if length is not None and length > min(self._limits.items, self._values):
            # Which of them come first differs from process to process.
            self.truncated = True
            return [f"{_ITEMS_AFTER_CUT} ({length} more)"]
        return sorted(self._list(value, length, depth), key=json.dumps)

    def _mapping(
        self, pairs: Iterable[tuple[object, object]], length: int | None, depth: int
    ) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        seen = 0
        for (key, item), left in self._some(pairs, length):
            seen += 1
            kept[self._key(key)] = self._share(item, depth, left)
        if length is None or length > seen:
            self.truncated = True
            kept[_ITEMS_AFTER_CUT] = _more(length, seen)
        return kept

    def _key(self, key: object) -> str:
        plain = key if type(key) is str else self.serialize(key, self._limits.depth - 1)
        text = plain if isinstance(plain, str) else self._repr(key)
        self._characters -= min(len(text), LONGEST_KEY)
        if len(text) > LONGEST_KEY:
            self.truncated = True
            return f"{text[:LONGEST_KEY]}… ({len(text) - LONGEST_KEY} more characters)"
        return text

    def _some(self, items: Iterable[Any], length: int | None) -> Iterator[tuple[Any, int]]:
        """The first ones, each with how many are still to come, itself included."""
        most = self._limits.items if length is None else min(length, self._limits.items)
        for seen, item in enumerate(islice(items, self._limits.items)):
            yield item, max(1, most - seen)
            if self._values <= 0 or self._characters <= 0:
                return

    def _share(self, item: object, depth: int, left: int) -> Any:
        """Near the top a large item takes no more than its part: the others have theirs."""
        if depth > 1 or left > 100:
            return self.serialize(item, depth + 1)
        values, characters = _part(self._values, left), _part(self._characters, left)
        kept_back = self._values - values, self._characters - characters
        self._values, self._characters = values, characters
        plain = self.serialize(item, depth + 1)
        self._values += kept_back[0]
        self._characters += kept_back[1]
        return plain

    def _repr(self, value: object) -> str:
        if (known := self._reprs.get(id(value))) is not None:
            return known[1]
        if type(value) in self._broken:
            return _opaque(value)
        if self._reprs_left <= 0 or not _is_small(value):
            self.truncated = True
            return _opaque(value)
        self._reprs_left -= 1
        try:
            said = repr(value)
        except Exception:
            self._broken.add(type(value))
            raise
        text = _ADDRESS.sub("", said[: 2 * LONGEST_TEXT])
        if len(said) > 2 * LONGEST_TEXT:
            text += f"… ({len(said)} characters)"
        self._reprs[id(value)] = value, text  # keeps the object, so that its id stays its own
        return text


def to_json(value: object, limits: SerializerLimits = DISPLAY_LIMITS) -> Any:
    """The value as JSON has it; see `Serializer.serialize`."""
    return Serializer(limits).serialize(value)


def bounded_str(value: object, most: int = LONGEST_TEXT) -> str:
    """`str(value)`, at most so long; JSON of its beginning if it holds much more than that.
    Never raises an `Exception`."""
    if type(value) is str:
        return _cut(value, most)
    try:
        if isinstance(value, BaseException) and all(type(part) is str for part in value.args):
            return _cut(str.__str__(str(value)), most)
        beginning = _beginning(value, most)
        return _cut(str.__str__(str(value)), most) if beginning is None else beginning
    except Exception as error:
        if is_of_signal_handler(error):
            raise
        return _opaque(value)


def bounded_repr(value: object, most: int = 200) -> str:
    """`repr(value)` for a message, else like `bounded_str`."""
    try:
        beginning = _beginning(value, most)
        return _cut(repr(value), most) if beginning is None else beginning
    except Exception as error:
        if is_of_signal_handler(error):
            raise
        return _opaque(value)


def error_line(error: BaseException, most: int) -> str:
    """`ValueError: its text`, at most so long, on one line or more. Never raises an `Exception`."""
    kind = type(error)
    try:
        plain = kind.__module__ in ("builtins", "__main__")
        name = kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"
    except Exception:
        name = _opaque(error)
    text = bounded_str(error, most)
    return _cut(f"{name}: {text}" if text else name, most)


def _beginning(value: object, most: int) -> str | None:
    """None for a value of which `str` and `repr` are no longer than they can be."""
    walk = Serializer(SerializerLimits(values=200, text=most, characters=2 * most, reprs=5))
    plain = walk.serialize(value)
    if isinstance(value, str) or not walk.truncated:
        return None
    return plain if isinstance(plain, str) else _cut(_encoder.encode(plain), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def encode(value: object) -> bytes:
    """JSON in UTF-8, on one line, of what `to_json` gave; a lone surrogate becomes "?"."""
    return _encoder.encode(value).encode("utf-8", "replace")


def _opaque(value: object) -> str:
    try:
        return f"<{type(value).__qualname__}>"
    except Exception:  # a metaclass can break even this
        return "<an object>"


_encoder = json.JSONEncoder(default=_opaque, ensure_ascii=False, separators=(",", ":"))


def _part(budget: int, left: int) -> int:
    """Half of it, but so that each that is left has a little; its even share where that is more."""
    return max(budget // left, min(budget // 2, budget - 200 * left))


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except Exception as error:
        if is_of_signal_handler(error):
            raise
        return None


def _more(length: int | None, kept: int) -> str:
    return "more" if length is None else f"{length - kept} more"


def _is_container(value: object) -> bool:
    return isinstance(value, Mapping | AbstractSet | Sequence | deque) or _fields(value) is not None


def _fields(value: object) -> Iterable[tuple[str, object]] | None:
    """Names and values of an object whose `__repr__` would write out all of them, however much
    that is: dataclasses, attrs, pydantic's models. None for any other."""
    kind = type(value)
    if dataclasses.is_dataclass(kind) and _generated(kind):
        return ((f.name, getattr(value, f.name)) for f in dataclasses.fields(kind) if f.repr)
    if hasattr(kind, "__pydantic_fields__") and hasattr(kind, "__repr_args__"):
        return ((str(name), item) for name, item in value.__repr_args__())  # type: ignore[attr-defined]
    if (attributes := getattr(kind, "__attrs_attrs__", None)) is not None:
        return ((a.name, getattr(value, a.name)) for a in attributes if a.repr)
    return None


def _is_small(value: object) -> bool:
    """False for an object whose `__repr__` writes out all that it holds, if that is much."""
    if isinstance(value, partial):
        held: object = [value.func, value.args, value.keywords]
    elif isinstance(value, MethodType):
        held = value.__self__
    elif isinstance(value, BaseException):
        held = value.args
    elif isinstance(value, SimpleNamespace):
        held = vars(value)
    else:
        return True
    walk = Serializer(SerializerLimits(values=100, text=1_000, characters=10_000, reprs=20))
    walk.serialize(held)
    return not walk.truncated


def _generated(kind: type) -> bool:
    """Whether the dataclass has the `__repr__` that was made for it."""
    code = getattr(kind.__repr__, "__code__", None)
    return code is not None and code.co_filename.endswith(("dataclasses.py", "reprlib.py"))
