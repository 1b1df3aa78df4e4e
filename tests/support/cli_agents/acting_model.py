"""A checkpoint whose model acts: given an agent's prompt, it samples that agent's script.

A real vLLM serves it, so that real agents go through several turns of real tokens. Nothing is
learned. Each reply is a chain of tokens that occur nowhere else, and the output layer is solved
for: after each token of a chain comes the next one. The first token of a reply is sampled freely
among a few, with probabilities that depend on all of the prompt, so that log-probabilities tell
whether a prompt is the one that the engine read. Which reply is due is told by the chat template,
in a token of its own before each reply: it sees the tools and counts the replies.
"""

from __future__ import annotations

import itertools
import json
import pydoc_data.topics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from support.cli_agents.scripted_engine import Script
from support.engines.mock_engine import Answer

MAX_LENGTH = 131_072  # agents ask for up to 64,000 new tokens on top of 25,000 of prompt
END = "<|im_end|>"
ASIDE = "aside"
OPENINGS = 4  # first tokens that a reply may have
PIECE = 8  # characters of a token of a chain, or more
LOGIT = 40.0  # of the right token, over all others; agents sample at temperature 1
# A token's own embedding is in the first dimensions; what attention and MLP say of its context
# is in the others, and moves nothing but the choice among openings.
OWN = 512  # more than there are links, or the output layer could not be solved for
CONTEXT = 128
LOUDNESS = 0.1  # of the context in the last norm, where it weakens a token's own part
SHARPNESS = 3.0  # of attention: at 1 it averages over a long prompt, and hears no single token

# PARTS is [[tool that tells the part, the part, number of its last reply], ...].
_TEMPLATE = """\
{%- set play = namespace(part='ASIDE', last=0, step=0) %}
{%- set offered = (tools or []) | map(attribute='function.name') | list %}
{%- for tool, part, last in PARTS %}
{%- if tool in offered and play.part == 'ASIDE' %}
{%- set play.part = part %}{% set play.last = last %}
{%- endif %}
{%- endfor %}
{%- for tool in tools or [] %}{{ '<|im_start|>tools\\n' if loop.first }}{{ tool | tojson }}
{{ '<|im_end|>\\n' if loop.last }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' -%}
<|im_start|><|{{ play.part }} {{ [play.step, play.last] | min }}|>{{ message.content or '' }}\
{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% set play.step = play.step + 1 %}
{%- else -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|><|{{ play.part }} {{ [play.step, play.last] | min }}|>\
{% endif %}"""


@dataclass(frozen=True, slots=True)
class Chain:
    """One reply: the token before it, what it may begin with, and how it goes on to its end."""

    header: str
    openings: Sequence[str]
    pieces: Sequence[str]

    def links(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Each token of the chain with those that may come after it."""
        yield self.header, self.openings
        for opening in self.openings:
            yield opening, self.pieces[:1]
        for piece, after in itertools.pairwise([*self.pieces, END]):
            yield piece, [after]


def save_acting_model(path: Path, parts: Mapping[str, Script]) -> Path:
    """Writes a checkpoint folder that vLLM and transformers load.

    `parts` are scripts by name; a request plays the first one whose tool it offers.
    """
    chains = list(_chains(parts))
    tokenizer = _tokenizer(chains)
    told = [[script.tool, name, len(script.steps) - 1] for name, script in parts.items()]
    template = _TEMPLATE.replace("PARTS", json.dumps(told)).replace("ASIDE", ASIDE)
    tokenizer.chat_template = template
    _model(tokenizer, chains).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _chains(parts: Mapping[str, Script]) -> Iterator[Chain]:
    used: set[str] = set()
    replies = {name: script.steps for name, script in parts.items()}
    replies[ASIDE] = [next(iter(parts.values())).aside]
    for name, says in replies.items():
        for step, say in enumerate(says):
            openings = [f"[{name} {step} {letter}] " for letter in "abcdefgh"[:OPENINGS]]
            yield Chain(f"<|{name} {step}|>", openings, _pieces(_text(say), used))


def _text(say: Answer) -> str:
    """As the Hermes parser reads it, and the template writes it but for the white space in
    arguments: prompts that are rendered afresh do not hold what was sampled."""
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in say.tool_calls
    ]
    return say.content + "".join(calls)


def _pieces(text: str, used: set[str]) -> list[str]:
    """`text`, cut into tokens that are not `used` anywhere else; they are from now on."""
    pieces: list[str] = []
    while text:
        size = PIECE
        while text[:size] in {*used, *pieces} and size < len(text):
            size += 1
        pieces.append(text[:size])
        text = text[size:]
    while pieces[-1] in {*used, *pieces[:-1]}:  # an ending that was there before
        pieces[-2:] = ["".join(pieces[-2:])]
    used.update(pieces)
    return pieces


def _tokenizer(chains: Sequence[Chain]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of English, made from the documentation that Python brings along: long
    prompts have a quarter as many tokens as bytes. The tokens of the chains come on top."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=["<|endoftext|>", "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pydoc_data.topics.topics.values(), trainer)
    tokenizer.add_special_tokens([chain.header for chain in chains])
    said = [token for chain in chains for token in (*chain.openings, *chain.pieces)]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in said])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token="<|endoftext|>",
        model_max_length=MAX_LENGTH,
    )


@torch.no_grad()
def _model(tokenizer: PreTrainedTokenizerFast, chains: Sequence[Chain]) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=OWN + CONTEXT,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    model.model.embed_tokens.weight.normal_()[:, OWN:] = 0
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight *= SHARPNESS
        for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
            out.weight *= LOUDNESS
            out.weight[:OWN] = 0
    model.lm_head.weight.zero_()
    _solve(model, tokenizer, chains)
    for chain in chains:
        openings = tokenizer.convert_tokens_to_ids(list(chain.openings))
        model.lm_head.weight[openings, OWN:] = 0.25 * torch.randn(len(openings), CONTEXT)
    return model


def _solve(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, chains: Sequence[Chain]
) -> None:
    """Sets the output layer so that each token of a chain brings about those that come next."""
    ids = tokenizer.convert_tokens_to_ids
    links = [(ids(token), ids(list(after))) for chain in chains for token, after in chain.links()]
    assert len(links) < OWN, f"{len(links)} links: raise OWN"
    wanted = torch.zeros(len(links), len(tokenizer))
    for row, (_, after) in enumerate(links):
        wanted[row, after] = LOGIT
    # What the last norm makes of a token, but for what its context adds to the length.
    states = model.model.embed_tokens.weight[[token for token, _ in links], :OWN]
    states = states / states.pow(2).mean(-1, keepdim=True).sqrt()
    model.lm_head.weight[:, :OWN] = (torch.linalg.pinv(states) @ wanted).T
