"""A page of the site that would fetch something from another host is a warning."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

_FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?:https?:)?//[^\"]+"
    r"|<link\b(?=[^>]*\brel=\"(?:stylesheet|icon|preconnect|preload)\")[^>]*\bhref=\"(?:https?:)?//[^\"]+"
)
_log = logging.getLogger("mkdocs.hooks.offline")


def on_post_build(*, config: MkDocsConfig) -> None:
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        for fetched in _FETCHED.findall(page.read_text(encoding="utf-8")):
            _log.warning("%s fetches %s", page.relative_to(config.site_dir), fetched[:200])
