"""`trainer settings`: every setting as a TOML file with comments, which `trainer serve` reads.

What is as it is without the file is written as a comment (`#lr = 1e-06`), so that what follows from
a preset or another setting still does when that is changed.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_settings import EnvSettingsSource

from tracegrad.proxy.config import ProxySettings
from tracegrad.settings_sources import read_toml
from tracegrad_trainer.config.loading import apply_override, load_settings
from tracegrad_trainer.config.reference import Setting, Table, settings_tables
from tracegrad_trainer.config.trainer import TrainerSettings

WIDTH = 100
HEAD = """\
Settings of `trainer serve`, `trainer step` and `trainer sft`. A line that begins with # and a name
is the default; take the # away to change it. --set TABLE.NAME=VALUE and the environment
(TRACEGRAD_TRAINER_TABLE__NAME) go before the file."""


def default_settings_file() -> str:
    """Every setting at its default, all of them comments."""
    return _written({}, None)


def effective_settings_file(config: Path | None, overrides: list[str]) -> str:
    """The same with what the file, the environment and `overrides` give; that is no comment, and
    marked where it differs from the default.

    Raises:
        SettingsError: as `load_settings`.
    """
    settings = load_settings(config, overrides)
    given: dict[str, Any] = {}
    for source in (read_toml(config), _environment()):
        _merge(given, source)
    for override in overrides:
        apply_override(given, override)
    return _written(given, settings)


def _environment() -> dict[str, Any]:
    found = dict(EnvSettingsSource(TrainerSettings)())
    proxy = dict(EnvSettingsSource(ProxySettings)())
    names = {alias: name for name in ("store", "admin_key") for alias in _aliases(name)}
    proxy = {names.get(name, name): value for name, value in proxy.items()}
    if proxy:
        found["proxy"] = {**found.get("proxy", {}), **proxy}
    return found


def _aliases(name: str) -> list[str]:
    alias = ProxySettings.model_fields[name].validation_alias
    return [str(one) for one in getattr(alias, "choices", [])]


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(name, {}), Mapping):
            into[name] = dict(into.get(name, {}))
            _merge(into[name], value)
        else:
            into[name] = value


def _written(given: Mapping[str, Any], settings: TrainerSettings | None) -> str:
    blocks = [_comment(HEAD)]
    for table in settings_tables():
        here = _inside(given, table.name)
        found = _object(settings, table.name)
        blocks.append([*_header(table, there=found is not None or not table.optional)])
        blocks += [[*_entry(table, setting, here, found)] for setting in table.settings]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _inside(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    for part in filter(None, name.split(".")):
        inner = given.get(part)
        given = inner if isinstance(inner, Mapping) else {}
    return given


def _object(settings: BaseModel | None, name: str) -> BaseModel | None:
    for part in filter(None, name.split(".")):
        settings = getattr(settings, part, None)
    return settings


def _header(table: Table, *, there: bool) -> Iterator[str]:
    if table.name:
        if not there:
            yield "# Left out by default, which turns off what it is about."
        yield f"[{table.name}]" if there else f"#[{table.name}]"
        yield from _comment(table.what)


def _entry(
    table: Table, setting: Setting, given: Mapping[str, Any], found: BaseModel | None
) -> Iterator[str]:
    value = setting.default if found is None else getattr(found, setting.name)
    if value == setting.default:
        value = setting.default  # 600.0 as it is written: 600
    default = toml_value(setting.default)
    shown_default = default or setting.follows or ("" if setting.required else "none")
    yield from _comment(setting.what)
    unit = f", in {setting.unit}" if setting.unit else ""
    yield from _comment(
        f"{setting.allowed}{unit}; "
        + (f"default: {shown_default}" if shown_default else "required")
    )
    if setting.secret:
        here = setting.name in given
        yield f"# {setting.name} = {'is given, and not written here' if here else ''}".rstrip()
        return
    text = toml_value(value)
    if setting.name in given and text is None and default is not None:
        yield f"# {setting.name} = none; TOML has no word for it: --set {table.path(setting)}=null"
    elif setting.name in given and text is not None:
        changed = f"  # changed; default: {shown_default or 'none, it is required'}"
        yield f"{setting.name} = {text}{changed if text != default else ''}"
    elif text is None or (setting.follows and found is None):
        yield f"# {setting.name} ="
    else:
        yield f"#{setting.name} = {text}" + ("" if text == default else "  # as resolved here")


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def toml_value(value: Any) -> str | None:
    """As TOML, in one line; None: TOML has no such value."""
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(one) or '' for one in value)}]"
    if isinstance(value, Mapping):
        inside = (
            f"{json.dumps(k, ensure_ascii=False)} = {toml_value(v)}" for k, v in value.items()
        )
        return f"{{ {', '.join(inside)} }}" if value else "{}"
    # JSON's strings are TOML's, but for one character that JSON does not escape. A store's URL is
    # without its password.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
