"""A tiny random Qwen3 whose tokens are single characters.

What such a model says, text or nonsense, is tokenised back to the very tokens that it sampled:
a conversation that goes on is a prompt that goes on, and turn trees can be checked.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.trainer.tiny_model import CHAT_TEMPLATE, tiny_model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # `tiny_model` ends a turn with the third
CHARACTERS = string.ascii_letters + string.digits + string.punctuation


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character, the space and the line feed."""
    # Byte-level BPE writes these two in its own alphabet; without merges nothing else happens.
    vocabulary = {piece: i for i, piece in enumerate([*SPECIAL, *CHARACTERS, "Ġ", "Ċ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def save_char_model(path: Path, *, seed: int = 0) -> Path:
    """Writes a checkpoint folder that vLLM and transformers load."""
    tokenizer = char_tokenizer()
    tiny_model(len(tokenizer), seed=seed).save_pretrained(path)
    tokenizer.save_pretrained(path)
    generation = {"eos_token_id": 2, "pad_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path
