"""Says on the site which blocks of code no test runs, and why: `<!-- not run: REASON -->`."""

from __future__ import annotations

import html
import re
from typing import Any

_MARK = re.compile(r"^<!-- not run: (.*?) -->$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _MARK.sub(_note, markdown)


def _note(found: re.Match[str]) -> str:
    why = re.sub(r"`(.*?)`", r"<code>\1</code>", html.escape(found[1]))
    return f'<p class="untried">Not run by a test: {why}.</p>\n'
