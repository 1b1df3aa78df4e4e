"""Messages of turns as texts, whatever agents wrote."""

from __future__ import annotations

import pytest

from tracegrad.inspect.transcript import as_text


def _picture(url: str) -> list[dict[str, object]]:
    return [{"type": "image_url", "image_url": {"url": url}}]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/png;base64," + "A" * 4000, "[image: image/png, 3.0 kB]"),
        ("data:;base64," + "A" * 4000, "[image: data, 3.0 kB]"),
        ("data:," + "A" * 4000, "[image: data, 3.0 kB]"),
        ("https://example.org/a.png", "[image: https://example.org/a.png]"),
        ("data:image/png", "[image: data:image/png]"),
    ],
)
def test_a_picture_is_named(url: str, said: str) -> None:
    assert as_text(_picture(url)) == said


@pytest.mark.parametrize("head", ["data:", "data:a;"])
def test_a_data_url_without_an_end_is_read_once(head: str) -> None:
    # Tried again from each of its characters, it would take hours.
    url = head + "a" * 4_000_000
    assert as_text(_picture(url)) == f"[image: {url[:100]}…]"
