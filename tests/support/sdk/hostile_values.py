"""Values and errors that break whoever looks at them carelessly. Each entry makes a fresh one."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np
import pydantic


class _Fails(Exception):
    pass


def _fail(*args: object, **kwargs: object) -> Any:
    raise _Fails("of the agent's own")


def _of(bases: tuple[type, ...] = (), **methods: Any) -> type:
    return type("Hostile", bases, {"__abstractmethods__": frozenset(), **methods})


def _endless(self: object) -> Iterator[int]:
    while True:
        yield 1


class _Endless(Sequence[int]):
    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, index: Any) -> Any:
        return index


class _Pairs(Mapping[str, int]):
    """Its `items()` fails, gives no pairs, or has no end."""

    def __init__(self, items: Callable[[], Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: str) -> int:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        raise _Fails

    def items(self) -> Any:
        return self._items()


class _Refuses(type):
    def __getattribute__(cls, name: str) -> Any:
        raise _Fails(name)


@dataclasses.dataclass
class _Record:
    held: object
    secret: object = dataclasses.field(default=None, repr=False)


class _Model(pydantic.BaseModel):
    held: Any


def _cycle() -> list[Any]:
    loop: list[Any] = []
    loop.extend([loop] * 1_000)
    return loop


def _deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(20_000):
        value = [value]
    return value


def _number(**methods: Any) -> Any:
    kind = _of(__float__=_fail, **methods)
    Real.register(kind)
    return kind()


VALUES: dict[str, Callable[[], Any]] = {
    "huge int": lambda: 10**5_000,
    "negative int of 100,000 digits": lambda: -(10**100_000),
    "65 bits": lambda: 2**64,
    "nan": lambda: float("nan"),
    "infinity": lambda: -float("inf"),
    "lone surrogate": lambda: "a\ud800b\x00",
    "long text": lambda: "x" * 3_000_000,
    "long bytes": lambda: b"\xff" * 3_000_000,
    "strided memory": lambda: memoryview(b"ab" * 1_000_000)[::2],
    "cycle": _cycle,
    "deep": _deep,
    "endless sequence": _Endless,
    "endless items": lambda: _Pairs(lambda: _endless(None)),
    "items fails": lambda: _Pairs(_fail),
    "items is None": lambda: _Pairs(lambda: None),
    "a dict's items fails": lambda: _of((dict,), items=_fail, __len__=_fail)(a=1),
    "a list's iter fails": lambda: _of((list,), __iter__=_fail)([1]),
    "a list without end": lambda: _of((list,), __iter__=_endless)([1]),
    "a set of a million": lambda: set(range(1_000_000)),
    "a deque of a million": lambda: collections.deque(range(1_000_000)),
    "len fails": lambda: _of((list,), __len__=_fail)([1]),
    "len is negative": lambda: _of((list,), __len__=lambda self: -1)([1]),
    "repr fails": lambda: _of(__repr__=_fail)(),
    "repr recurses": lambda: _of(__repr__=lambda self: repr(self))(),
    "repr is no text": lambda: _of(__repr__=lambda self: 7)(),
    "repr is long": lambda: _of(__repr__=lambda self: "r" * 2_000_000)(),
    "str fails": lambda: _of((str,), __str__=_fail, __repr__=_fail)("text"),
    "class fails": lambda: _of(__class__=property(_fail))(),
    "attributes fail": lambda: _of(__getattribute__=_fail)(),
    "the metaclass fails": lambda: _Refuses("Hostile", (), {})(),
    "equality and truth fail": lambda: _of(__eq__=_fail, __bool__=_fail, __hash__=_fail)(),
    "int of its own": lambda: _of((int,), __index__=_fail, __str__=_fail, __repr__=_fail)(3),
    "float of its own": lambda: _of((float,), __float__=_fail, __repr__=_fail)(0.5),
    "number that is none": _number,
    "number without truth": lambda: _number(__bool__=_fail, __repr__=_fail),
    "fraction": lambda: Fraction(10**400, 3),
    "decimal": lambda: Decimal("sNaN"),
    "array": lambda: np.zeros((1_000, 1_000)),
    "array of objects": lambda: np.array([object()] * 10, dtype=object),
    "dataclass": lambda: _Record([0] * 1_000_000, _of(__repr__=_fail)()),
    "model": lambda: _Model(held=[0] * 1_000_000),
    "partial": lambda: functools.partial(_fail, [0] * 1_000_000),
    "namespace": lambda: types.SimpleNamespace(held=[0] * 1_000_000),
    "generator": lambda: (i for i in range(3)),
    "lock": threading.Lock,
    "module": lambda: threading,
    "keys": lambda: {(1, 10**5_000): 1, b"k": 2, None: 3, "\ud800": 4, _of(__repr__=_fail)(): 5},
    "many texts": lambda: ["y" * 100_000] * 10_000,
    "many of many": lambda: [[["z"] * 1_000] * 1_000] * 1_000,
}  # fmt: skip

# The only one that is a number within the bounds of a reward.
USABLE_REWARD = "int of its own"


class _Silent(Exception):
    def __str__(self) -> str:
        raise _Fails

    __repr__ = __str__


class _Noted(Exception):
    @property
    def __notes__(self) -> Any:
        raise _Fails


@dataclasses.dataclass(frozen=True)
class _Frozen(Exception):
    code: int = 7


class _Stop(BaseException):
    pass


def _chained() -> Exception:
    last = ValueError("first")
    for number in range(5_000):
        error = ValueError(number)
        error.__cause__ = last
        last = error
    return last


ERRORS: dict[str, Callable[[], BaseException]] = {
    "plain": lambda: ValueError("no such tool"),
    "without text": _Silent,
    "notes fail": _Noted,
    "immutable": _Frozen,
    "huge int": lambda: ValueError(10**5_000),
    "long text": lambda: ValueError("x" * 3_000_000),
    "holds much": lambda: ValueError([0] * 100_000),
    "long chain": _chained,
    "group": lambda: ExceptionGroup("many", [_Silent() for _ in range(100)]),
    "surrogate": lambda: LookupError("\ud800"),
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "of its own base": _Stop,
}
