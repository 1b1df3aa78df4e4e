"""Times, counts and shortened texts as people read them: what store, command line and trainer print
is alike."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

# Seconds of each unit, the longest first.
_AGE_UNITS = (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0))


def format_age(moment: float, *, compact: bool = False) -> str:
    """How long ago `moment` was, by this machine's clock.

    Args:
        moment: seconds since the epoch; one in the future is `0 s`.
        compact: for columns, and as `--since` reads them: `42s`, `3m`, `5h`, `2d`.
    """
    elapsed = format_elapsed(time.time() - moment)
    return elapsed.replace("min", "m").replace(" ", "") if compact else elapsed


def format_elapsed(seconds: float) -> str:
    """In its longest unit, without decimals: `42 s`, `3 min`, `5 h`, `2 d`."""
    for unit, size in _AGE_UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def format_duration(seconds: float) -> str:
    """How long something took: `35 ms`, `1.2 s`, `2.5 min`, and from two of a unit on in it."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    for unit, size in _AGE_UNITS[:2]:
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds / 60:.1f} min"


def format_time(moment: float) -> str:
    """Local date and time of seconds since the epoch; what no calendar has, as the number."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (ValueError, OverflowError, OSError):
        return f"{moment:.6g} s since 1970"


def format_count(count: int, word: str) -> str:
    """`1 turn`, `1,200 turns`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def cut_text(text: str, width: int) -> str:
    """At most `width` characters, the last of them `…` where some are left out."""
    return text if len(text) <= width else f"{text[: max(0, width - 1)].rstrip()}…"


# So many characters before the first that differs are looked through for a word's beginning.
_LEAD = 12


def shorten_apart(
    texts: Iterable[str], width: int, *, cut: Callable[[str, int], str] = cut_text
) -> dict[str, str]:
    """Each text in at most `width`. Those that would look alike keep their beginning and show where
    they part: `Solve the …with 3 disks`. Texts that part in several places may still look alike
    where there is no room for them.

    Args:
        cut: makes a text fit, with `…` at its end; by characters, or by a terminal's cells.
    """
    shown = {text: cut(text, width) for text in texts}
    for group in _groups_alike(shown) if width >= _LEAD else ():
        shown |= _parted(group, width, cut, after=0)
    return shown


def _groups_alike(shown: Mapping[str, str]) -> list[list[str]]:
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for text, short in shown.items():
        alike[short].append(text)
    return [group for group in alike.values() if len(group) > 1]


def _parted(
    texts: Sequence[str], width: int, cut: Callable[[str, int], str], *, after: int
) -> dict[str, str]:
    """`after`: so many characters are known to be the same, and where they part was tried."""
    same = len(os.path.commonprefix(texts))  # noqa: RUF071 (of characters)
    word = max(texts[0].rfind(end, max(0, same - _LEAD), same) for end in " …") + 1
    head = cut(texts[0], width // 3)
    shown = {text: head + cut(text[word or same :], width - width // 3) for text in texts}
    for group in _groups_alike(shown):
        if same > after:
            shown |= _parted(group, width, cut, after=same)
    return shown
