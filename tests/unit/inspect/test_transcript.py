"""Messages of turns as texts, whatever agents wrote."""

from __future__ import annotations

import pytest

from tracegrad.events import Json, Turn, logprob_array, token_id_array
from tracegrad.inspect.transcript import RepeatedMessages, Transcript, as_text


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


def _turn(number: int, messages: list[Json], parent: str | None) -> Turn:
    return Turn(
        turn_id=f"t{number}",
        rollout_id="r",
        parent_id=parent,
        dialect="chat",
        model="m",
        prompt_token_ids=token_id_array([1]),
        completion_token_ids=token_id_array(),
        completion_logprobs=logprob_array(),
        policy_versions=(),
        request={"model": "m", "messages": messages},
    )


def _news(before: list[str], now: list[str]) -> list[str | int]:
    """What the second of two turns has beside the first: texts, and how many messages repeat."""
    turns = [
        _turn(n, [{"role": "user", "content": text} for text in texts], "t0" if n else None)
        for n, texts in enumerate((before, now))
    ]
    found = Transcript(turns).new_messages(1)
    return [each.messages if isinstance(each, RepeatedMessages) else each.text for each in found]


MANY = [str(n) for n in range(1_000)]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (["a", "b"], ["a", "b", "c"], [2, "c"]),
        (["a", "b", "c", "d"], ["a", "x", "c", "d", "e"], [1, "x", 2, "e"]),
        (MANY, [*MANY, "new"], [1_000, "new"]),
        (MANY, ["edited", *MANY[1:], "new"], ["edited", 999, "new"]),
        (MANY, [*MANY[:10], "edited", *MANY[11:], "new"], [10, "edited", 989, "new"]),
        (MANY, ["0", "a summary", *MANY[-20:], "new"], [1, "a summary", 20, "new"]),
    ],
)
def test_what_a_turn_repeats_is_counted(
    before: list[str], now: list[str], said: list[str | int]
) -> None:
    assert _news(before, now) == said


def test_equal_messages_by_the_thousand_are_not_compared_with_each_other() -> None:
    # Each with each, these would be 2,500,000,000 pairs.
    same = ["ok"] * 50_000
    assert _news(["a", *same], ["b", *same, "c"]) == ["b", 50_000, "c"]
