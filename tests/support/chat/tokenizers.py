"""Tokenizers of every kind that chat models have, trained on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core

TAGS = ("<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", "<tool_call>")
_CORPUS = [
    "How many lamps are in Oslo? There are 17 lamps in the shop.",
    '{"name": "stock", "arguments": {"item": "lamp", "city": "Oslo"}}\n</tool_call>',
    "You are a careful assistant. Answer with text or with a tool call.\n\n",
    "a  b   c\td\n e\r\n qx0vx0000zzzzzz 0123456789 the quick brown fox jumps over the lazy dog",
] * 4
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SPACES_BACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def _byte_level(added: Sequence[AddedToken], normalizer: Any = None) -> Core:
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if normalizer is not None:
        core.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    core.add_special_tokens(list(added))
    return core


def _sentence_pieces(added: Sequence[AddedToken], set_up: Callable[[Core], None]) -> Core:
    core = Core(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    set_up(core)
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=["<unk>", *_BYTES], show_progress=False
    )
    core.train_from_iterator(_CORPUS, trainer)
    # The bytes are tokens of the vocabulary, not added ones: text that spells one stays text.
    vocabulary = core.get_vocab(with_added_tokens=True)
    merges = [(left, right) for left, right in _merges(core)]
    core.model = models.BPE(
        vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    fresh = Core(core.model)
    set_up(fresh)
    fresh.add_special_tokens(list(added))
    return fresh


def _merges(core: Core) -> list[list[str]]:
    import json

    merges: list[list[str]] = json.loads(core.to_str())["model"]["merges"]
    return merges


def _gemma(core: Core) -> None:
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    core.decoder = decoders.Sequence(_SPACES_BACK)


def _metaspace(scheme: str) -> Callable[[Core], None]:
    def set_up(core: Core) -> None:
        core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
        core.decoder = decoders.Sequence([*_SPACES_BACK, decoders.Strip(" ", 1, 0)])

    return set_up


def _prepending(core: Core) -> None:
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence([*_SPACES_BACK, decoders.Strip(" ", 1, 0)])


def _word_pieces(added: Sequence[AddedToken]) -> Core:
    core = Core(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=200))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=600,
        special_tokens=["[UNK]"],
        initial_alphabet=[chr(code) for code in range(33, 127)],
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    core.add_special_tokens(list(added))
    return core


def _unigram(added: Sequence[AddedToken]) -> Core:
    core = Core(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    core.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<unk>"],
        unk_token="<unk>",
        initial_alphabet=[chr(code) for code in range(33, 127)],
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    core.add_special_tokens(list(added))
    return core


# Whether a kind gives simple text back without being asked is part of what is tested.
KINDS: dict[str, tuple[Callable[[Sequence[AddedToken]], Core], Callable[[str], AddedToken]]] = {
    "bytes": (_byte_level, AddedToken),
    "composed": (lambda added: _byte_level(added, normalizers.NFC()), AddedToken),
    "right_stripping": (_byte_level, lambda tag: AddedToken(tag, rstrip=True)),
    "both_stripping": (
        lambda added: _byte_level(added, normalizers.NFC()),
        lambda tag: AddedToken(tag, rstrip=True, lstrip=tag == "<|end|>"),
    ),
    "gemma": (lambda added: _sentence_pieces(added, _gemma), AddedToken),
    "first_word": (lambda added: _sentence_pieces(added, _metaspace("first")), AddedToken),
    "every_piece": (lambda added: _sentence_pieces(added, _metaspace("always")), AddedToken),
    "prepending": (lambda added: _sentence_pieces(added, _prepending), AddedToken),
    "word_pieces": (_word_pieces, lambda tag: AddedToken(tag, rstrip=True, lstrip=True)),
    "unigram": (_unigram, AddedToken),
    # A token that is matched in normalised text, and as a word only.
    "normalized": (
        lambda added: _byte_level(added, normalizers.NFC()),
        lambda tag: AddedToken(tag, normalized=True, single_word=tag == "<tool_call>"),
    ),
}
# Those whose texts are known without encoding them.
KNOWN = ("bytes", "composed", "right_stripping", "both_stripping", "gemma", "first_word")


@cache
def core(kind: str) -> Core:
    build, token = KINDS[kind]
    return build([token(tag) for tag in TAGS])
