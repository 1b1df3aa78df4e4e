"""What a tokenizer makes of a text: `decode(encode(text))`, without encoding it.

For most tokenizers that is the text itself. Some strip white space beside special tokens, compose
characters, or write spaces in a way that looks the same as a character of the text. The kinds
that today's models have are distinguished here by their parts; for any other, and for a text that
is not simple enough, nothing is assumed and the tokenizer itself is asked.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

# None: ask the tokenizer. A reading that is given here is encoded to the same ids as the text.
Roundtrip = Callable[[str], str | None]

_CUTS = {"Split", "Digits", "Punctuation", "ByteLevel"}
# White space as Rust's regular expressions see it; Python's has four characters more.
_SPACE = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"


def roundtrip_of(core: Tokenizer) -> Roundtrip:
    added = core.get_added_tokens_decoder()
    plain = _plain_reading(core)
    if plain is None or not _decode_to_themselves(core, added):
        return lambda _: None
    stripping = [token for token in added.values() if token.lstrip or token.rstrip]
    if not stripping:
        return plain
    contents = [token.content for token in added.values()]
    for token in stripping:
        longer = any(t != token.content and t.startswith(token.content) for t in contents)
        if longer or not found_anywhere(token, contents, core):
            return lambda _: None
    strip = _stripping(stripping)
    return lambda text: plain(strip(text))


def found_anywhere(token: AddedToken, contents: list[str], core: Tokenizer) -> bool:
    """Whether an added token is found wherever its text stands, whatever is on its left:
    `contents` are the texts of all added tokens. Special ones are matched in the text as it is, the
    leftmost first and the longest of those."""
    text = token.content
    if token.single_word or text[:1].isspace():
        return False
    if token.normalized and core.normalizer is not None:
        return False
    return not any(_can_swallow(other, text) for other in contents if other != text)


def _can_swallow(other: str, text: str) -> bool:
    """Whether `other` can begin before `text` begins and reach into it."""
    longest = min(len(other) - 1, len(text))
    return text in other[1:] or any(
        other.endswith(text[:length]) for length in range(1, longest + 1)
    )


def _stripping(tokens: list[AddedToken]) -> Callable[[str], str]:
    """White space taken away beside the tokens that take it."""
    behind = _any_of([token for token in tokens if token.rstrip])
    before = _any_of([token for token in tokens if token.lstrip])
    # Groups begin with the tokens' own text: the search skips to where one may be.
    right = re.compile(f"({behind}){_SPACE}+") if behind else None
    left = re.compile(f"{_SPACE}+(?={before})") if before else None

    def strip(text: str) -> str:
        if right is not None:
            text = right.sub(r"\1", text)
        return text if left is None else left.sub("", text)

    return strip


def _any_of(tokens: list[AddedToken]) -> str:
    longest_first = sorted((token.content for token in tokens), key=len, reverse=True)
    return "|".join(map(re.escape, longest_first))


def _decode_to_themselves(core: Tokenizer, added: Mapping[int, AddedToken]) -> bool:
    return all(
        core.decode([id_], skip_special_tokens=False) == token.content
        for id_, token in added.items()
    )


def _plain_reading(core: Tokenizer) -> Roundtrip | None:
    """Of text between added tokens. None for a kind that is not known to give text back."""
    model = core.model
    if not isinstance(model, models.BPE):
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if _is_byte_level(core):
        normalizer = _state(core.normalizer).get("type")
        if normalizer is None:
            return lambda text: text
        return _composed if normalizer == "NFC" else None
    if not _has_bytes(core):
        return None
    return _sentence_pieces(core)


def _composed(text: str) -> str | None:
    return text if unicodedata.is_normalized("NFC", text) else None


def _is_byte_level(core: Tokenizer) -> bool:
    """Cuts that take nothing away, then bytes, all of which are in the vocabulary."""
    steps = _steps(core.pre_tokenizer, "pretokenizers")
    return (
        bool(steps)
        and steps[-1]["type"] == "ByteLevel"
        and _only_cuts(steps)
        and _state(core.decoder).get("type") == "ByteLevel"
        and all(core.token_to_id(char) is not None for char in pre_tokenizers.ByteLevel.alphabet())
    )


def _only_cuts(steps: list[dict[str, Any]]) -> bool:
    return all(
        step["type"] in _CUTS
        and not step.get("add_prefix_space")
        and step.get("behavior") != "Removed"
        for step in steps
    )


def _has_bytes(core: Tokenizer) -> bool:
    return bool(core.model.byte_fallback) and all(
        core.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)
    )


def _sentence_pieces(core: Tokenizer) -> Roundtrip | None:
    """A space is written "▁": by a normalizer (Gemma), or by the pre-tokenizer, which also puts
    one before the first word, and the decoder takes it away again (Llama 2, Mistral)."""
    to_space: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer = _state(core.normalizer)
    steps = _steps(core.pre_tokenizer, "pretokenizers")
    back = _steps(core.decoder, "decoders")
    if normalizer == {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
        if back == to_space and _only_cuts(steps):
            return lambda text: None if "▁" in text else text
        return None
    first_stripped = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    one = steps[0] if len(steps) == 1 else {}
    if (
        not normalizer
        and (one.get("type"), one.get("replacement")) == ("Metaspace", "▁")
        and one.get("prepend_scheme") == "first"
        and back == [*to_space, first_stripped]
    ):
        return lambda text: None if "▁" in text or text.startswith(" ") else text
    return None


def _steps(component: Any, inner: str) -> list[dict[str, Any]]:
    state = _state(component)
    steps: list[dict[str, Any]] = state.get(inner, [state]) if state else []
    return steps


def _state(component: Any) -> dict[str, Any]:
    """A component's own JSON; empty where there is none."""
    if component is None:
        return {}
    try:
        state: dict[str, Any] = json.loads(component.__getstate__())
    # One that is written in Python has nothing to show.
    except Exception:
        return {"type": "Custom"}
    return state
