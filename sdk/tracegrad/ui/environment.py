"""Templates: everything that is put into a page is escaped, and shown as people write it."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tracegrad.inspect.display_text import format_number, one_line, printable
from tracegrad.text_format import cut_text, format_age, format_count, format_duration, format_time
from tracegrad.ui.security import BASE, STATIC

STATIC_FOLDER = Path(__file__).parent / "static"
_HEALTH_CLASS = {"ok": "plain", "suspect": "warn", "quarantined": "bad"}
_OUTCOME_CLASS = {"completed": "good", "agent_error": "bad", "budget": "warn", "open": "live"}


def make_environment() -> Environment:
    """Escapes what it is given in every template, whatever the file is called; a name that is
    missing is an error."""
    made = Environment(
        loader=PackageLoader("tracegrad.ui"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "age": format_age,
        "moment": format_time,
        "iso": _iso,
        "duration": format_duration,
        "number": format_number,
        "count": format_count,
        "grouped": lambda value: f"{value:,}",
        "share": lambda value: f"{value:.1%}",
        "shown": printable,
        "line": one_line,
        "cut": lambda text, width: cut_text(one_line(text), width),
        "outcome_class": lambda outcome: _OUTCOME_CLASS.get(str(outcome), "other"),
        "health_class": lambda state: _HEALTH_CLASS[str(state)],
    }
    made.globals |= {"base": BASE, "static": _static_url, "single_file": False}
    return made


def _iso(moment: float) -> str:
    """For machines; empty for what no calendar has: one such time must not cost the page."""
    try:
        return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return ""


def _static_url(name: str) -> str:
    """With a digest of what is in the file: browsers keep it until that is another one."""
    return f"{STATIC}{name}?v={_digest(name)}"


_digests: dict[str, str] = {}


def _digest(name: str) -> str:
    if name not in _digests:
        _digests[name] = hashlib.sha256((STATIC_FOLDER / name).read_bytes()).hexdigest()[:12]
    return _digests[name]


def render(environment: Environment, template: str, **values: Any) -> str:
    return environment.get_template(template).render(**values)
