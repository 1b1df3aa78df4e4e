"""The vault's world in tokens: one word each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from .vault import JAMMED, NAMES, OPEN, PARTS, TOOLS, TURNS, Call

PAD, END, ASK, SEE = "<pad>", "<end>", "<open>", "<see>"
# A state is one word, and a call another: so even a model this small tells states apart from the
# start, as a large one does, and what it learns of one does not become a habit in all others.
STATES = tuple(f"{name}{bolts}" for name in NAMES for bolts in range(TURNS))
CALLS = {f"{tool}({part})": (tool, part) for tool in TOOLS for part in PARTS}
WORDS = (PAD, END, ASK, SEE, JAMMED, OPEN, *STATES, *CALLS)
ID = {word: i for i, word in enumerate(WORDS)}
LONGEST_CALL = 2  # tokens


def asked(state: str) -> list[int]:
    """The prompt of the first turn."""
    return _ids(ASK, state)


def seen(state: str) -> list[int]:
    """What comes behind a call."""
    return _ids(SEE, state)


def said(call: Call) -> list[int]:
    """A call as the model writes it."""
    return _ids(f"{call[0]}({call[1]})", END)


def heard(ids: Sequence[int]) -> Call | None:
    """The call in what the model wrote; None if it is none."""
    words = [WORDS[i] for i in ids]
    return CALLS.get(words[0]) if len(words) == LONGEST_CALL and words[1] == END else None


def new_model(seed: int) -> Qwen3ForCausalLM:
    """Random weights, fp32: a Qwen3 of 90,000 parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ID[END],
        pad_token_id=ID[PAD],
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():  # wide: what is learnt of one state hardly moves the others
        model.model.embed_tokens.weight.normal_(std=1.0)
    return model


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """The folder that the trainer starts from."""
    disable_progress_bar()
    core = Tokenizer(models.WordLevel(ID, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, unk_token=PAD
    ).save_pretrained(folder)


def _ids(*words: str) -> list[int]:
    return [ID[word] for word in words]
