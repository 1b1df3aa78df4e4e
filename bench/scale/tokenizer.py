"""A model's tokenizer and chat template, made from nothing: the proxy continues prompts by it,
token for token, and the mock engine writes prompts and replies by it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.proxy.text import passage

START, END = "<|im_start|>", "<|im_end|>"
# Large enough for tokens of some four characters, as those of real tokenizers; trained in seconds.
_VOCABULARY = 16_000
_CORPUS_TOKENS = 300_000
_AT_ONCE = 10_000  # characters
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def corpus(tokens: int, seed: str) -> str:
    """In ASCII, so that any token of it is a text of its own."""
    return "".join(passage(tokens, seed)).encode("ascii", "ignore").decode()


def save_tokenizer(folder: Path, *, vocabulary: int = _VOCABULARY) -> Path:
    """The folder of a byte-level BPE with a template in ChatML's form."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = corpus(_CORPUS_TOKENS, "tokenizer")
    core.train_from_iterator(
        (text[at : at + _AT_ONCE] for at in range(0, len(text), _AT_ONCE)), trainer
    )
    core.add_special_tokens([START, END])
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    config = {"chat_template": _TEMPLATE, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
