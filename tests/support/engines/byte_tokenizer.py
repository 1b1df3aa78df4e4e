"""Tokenizer and chat template of the mock engine's model: its tokens are bytes.

Where the proxy has them, what it renders is what the mock engine renders, token for token.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from support.engines.mock_engine import END, ROLES

_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def save_byte_tokenizer(folder: Path) -> Path:
    """Of texts in ASCII."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # Byte-level BPE writes some bytes in letters of its own.
    pieces = {split.pre_tokenize_str(chr(byte))[0][0]: byte for byte in range(128)}
    special = {"<|end|>": END, **{f"<|{role}|>": token for role, token in ROLES.items()}}
    tokenizer = Tokenizer(models.BPE(vocab={**pieces, **special}, merges=[]))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": _TEMPLATE, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
