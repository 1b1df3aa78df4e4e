"""Says on the site which blocks of code no test runs, and why: `<!-- not run: REASON -->`."""

from __future__ import annotations

import html
import re
from typing import Any

_MARK = re.compile(r"^<!-- not run: (.*?) -->$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _MARK.sub(
        lambda found: f'<p class="untried">Not run by a test: {html.escape(found[1])}.</p>\n',
        markdown,
    )
