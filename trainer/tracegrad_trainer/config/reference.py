"""Every setting with its default, what is allowed, its unit and its meaning: read off the settings
classes, which are the one place where any of that is written.

`trainer settings` (`config.settings_file`) and docs/settings.md (`config.settings_page`) are made
of it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.losses import PRESETS, ObjectiveSettings
from tracegrad_trainer.losses.part_names import PARTS

# What other settings decide, wherever it is not given. The class alone has another default.
FOLLOWS = {
    "proxy.upstream": "the trainer's own vLLM",
    "proxy.store": "store.db in state_dir",
    "vllm.model": "model",
    "vllm.socket": "in state_dir",
    "vllm.log": "in state_dir",
}
# By the ends of names; elsewhere the meaning says it.
UNITS = {
    "_kib_s": "KiB a second",
    "_kib": "KiB",
    "_mib": "MiB",
    "_bytes": "bytes",
    "_s": "seconds",
    "_tokens": "tokens",
    "_turns": "turns",
    "_steps": "optimizer steps",
    "tokens_per_micro_batch": "tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`default` None: there is none, or others decide (`follows`); `secret`: it is never shown."""

    name: str  # without its table
    what: str
    allowed: str
    unit: str
    default: Any
    required: bool
    follows: str
    secret: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`name` is dotted, empty for the settings above all tables; `optional`: left out by default,
    and then what is in it is off."""

    name: str
    what: str
    optional: bool
    settings: list[Setting]

    def path(self, setting: Setting) -> str:
        return f"{self.name}.{setting.name}" if self.name else setting.name


def settings_tables(
    model: type[BaseModel] = TrainerSettings, name: str = "", *, optional: bool = False
) -> Iterator[Table]:
    """The tables of a settings class, each before those inside of it."""
    own = [
        _setting(model, field, info, f"{name}.{field}" if name else field)
        for field, info in model.model_fields.items()
        if _table_class(info) is None
    ]
    what = " ".join((model.__doc__ or "").split("\n\n")[0].split())
    yield Table(name=name, what=what, optional=optional, settings=own)
    for field, info in model.model_fields.items():
        inner = _table_class(info)
        if inner is not None:
            inside = f"{name}.{field}" if name else field
            yield from settings_tables(inner, inside, optional=info.default is None)


def _setting(model: type[BaseModel], name: str, info: FieldInfo, path: str) -> Setting:
    default = info.get_default(call_default_factory=False)
    if model is ObjectiveSettings:
        default = getattr(ObjectiveSettings(), name)  # the preset's
    follows = FOLLOWS.get(path, "")
    unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
    return Setting(
        name=name,
        what=info.description or "",
        allowed=_allowed(name, info),
        unit=unit,
        default=None if default is PydanticUndefined or follows else default,
        required=info.is_required() and not follows,
        follows=follows,
        secret=SecretStr in _alternatives(info.annotation),
    )


def _table_class(info: FieldInfo) -> type[BaseModel] | None:
    for one in _alternatives(info.annotation):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """Of a union its members but None."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(one for one in get_args(annotation) if one is not types.NoneType)
    return (annotation,)


def _allowed(name: str, info: FieldInfo) -> str:
    if name == "preset":
        return _choices(PRESETS)
    if name in PARTS:
        return f"{_choices(PARTS[name])}, or module:function of your own"
    return " or ".join(_kind(one, _bounds(info.metadata)) for one in _alternatives(info.annotation))


def _kind(annotation: Any, bounds: str) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _choices(inside)
    if origin is tuple and inside[-1] is not Ellipsis:
        return f"list of {len(inside)} {_kind(inside[0], '')}s"
    if origin in (list, tuple):
        one = _kind(inside[0], "")
        return f"list of {one}" if get_origin(inside[0]) is Literal else f"list of {one}s"
    if origin is dict:
        return "table of any values" if inside[1] is Any else f"table of {_kinds(inside[1])}"
    if origin is not None:  # Annotated
        return _kind(inside[0], bounds)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    words = {bool: "true or false", int: "whole number", float: "number", Path: "path"}
    return words.get(annotation, "string") + bounds


def _kinds(annotation: Any) -> str:
    """Several of them."""
    one = _kind(annotation, "")
    first, _, rest = one.partition(" of ")
    return f"{first}s of {rest}" if rest else f"{one}s"


def _bounds(metadata: list[Any]) -> str:
    words = {
        Ge: ("ge", "at least"),
        Gt: ("gt", "above"),
        Le: ("le", "at most"),
        Lt: ("lt", "below"),
    }
    found = [
        f"{word} {getattr(bound, field)}"
        for bound in metadata
        for kind, (field, word) in words.items()
        if isinstance(bound, kind)
    ]
    return " " + " and ".join(found) if found else ""


def _choices(names: Any) -> str:
    return " | ".join(f'"{name}"' for name in names)
