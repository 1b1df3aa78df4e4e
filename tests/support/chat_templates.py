"""The real chat templates that tests read; they are not part of this repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def folder() -> Path | None:
    """TRACEGRAD_CHAT_TEMPLATES, or `shared/chat-templates` beside the repository or above it."""
    if named := os.environ.get("TRACEGRAD_CHAT_TEMPLATES"):
        return Path(named)
    places = (parent / "shared" / "chat-templates" for parent in Path(__file__).parents)
    return next((place for place in places if place.is_dir()), None)


needs_templates = pytest.mark.skipif(
    folder() is None, reason="no shared/chat-templates above, no TRACEGRAD_CHAT_TEMPLATES"
)


def chat_template(name: str) -> str:
    place = folder()
    assert place is not None, "the test needs_templates"
    return (place / f"{name}.jinja").read_text()
