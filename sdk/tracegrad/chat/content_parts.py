"""Content parts of canonical messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tracegrad.chat.messages import has_media
from tracegrad.events import Json


def text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def media_part(kind: Literal["image", "audio", "video"], url: str) -> Json:
    """`url` may be one with the data in it; `audio_url` and `video_url` are vLLM's."""
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def content_of(parts: Sequence[Json]) -> str | list[Json]:
    """Text parts alone are one string, as vLLM makes them for templates that take strings."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return list(parts)


def media_untrainable_reason(messages: Sequence[Json]) -> Literal["media"] | None:
    """Why a turn with these messages must not be trained, or None. Of canonical messages."""
    return "media" if has_media(messages) else None
