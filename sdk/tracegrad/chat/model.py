"""What a model folder says of its text: tokenizer, chat template, special tokens.

Only what the engine would make of the same folder is accepted. Where it would go another way
(a renderer of its own, a tokenizer in Python) the folder is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

from tracegrad.chat.template import ChatTemplate, RenderError
from tracegrad.chat.tokenizer import Tokenizer
from tracegrad.events import Json

# Special tokens that transformers knows by name; templates read them as variables.
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

# What vLLM 0.32 does not render with the chat template.
_OWN_RENDERERS = {
    "gpt_oss": "Harmony",
    "GptOssForCausalLM": "Harmony",
    "DeepseekV32ForCausalLM": "DeepSeek V3.2",
    "DeepseekV4ForCausalLM": "DeepSeek V4",
    "DeepseekV4ForConditionalGeneration": "DeepSeek V4",
    "DeepseekV41ForCausalLM": "DeepSeek V4",
    "KimiK3ForConditionalGeneration": "Kimi K3",
    "MoonshotKimiaForCausalLM": "Kimi Audio",
    "InklingForCausalLM": "Inkling",
    "InklingForConditionalGeneration": "Inkling",
}


class NotReproducible(Exception):
    """Why the model's prompts cannot be reproduced exactly; one line."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model's prompts are written. `tool_template` is used for requests with tools;
    `end_tokens` are the texts of the tokens that end a reply."""

    tokenizer: Tokenizer
    template: ChatTemplate
    tool_template: ChatTemplate | None = None
    end_tokens: frozenset[str] = frozenset()

    def template_for(self, tools: object) -> ChatTemplate:
        """As transformers chooses: an empty list of tools counts as tools."""
        if tools is not None and self.tool_template is not None:
            return self.tool_template
        return self.template


def load_chat_format(folder: Path, *, chat_template: str | None = None) -> ChatFormat:
    """Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, config.json,
    generation_config.json, chat_template.jinja and additional_chat_templates/. `chat_template` is
    the text of one that the engine was given in place of the model's. Raises NotReproducible."""
    if not folder.is_dir():
        raise NotReproducible(f"{folder} is no folder")
    config = _json(folder / "tokenizer_config.json")
    model = _json(folder / "config.json")
    _refuse_other_ways(folder, model, config)
    tokens = _special_tokens(folder, config)
    sources = {"default": chat_template} if chat_template else _templates(folder, config)
    if "default" not in sources:
        raise NotReproducible(f"{folder} has no chat template")
    try:
        templates = {
            name: ChatTemplate(source, {name: str(token) for name, token in tokens.items()})
            for name, source in sources.items()
            if name in ("default", "tool_use")
        }
    except RenderError as error:
        raise NotReproducible(f"{folder}: {error}") from error
    tokenizer = _tokenizer(folder, config, tokens)
    ends = _end_tokens(tokenizer, model, _json(folder / "generation_config.json"))
    ends |= {str(tokens["eos_token"])} if "eos_token" in tokens else set()
    return ChatFormat(tokenizer, templates["default"], templates.get("tool_use"), frozenset(ends))


def _end_tokens(tokenizer: Tokenizer, *configs: Json) -> set[str]:
    found = [config.get("eos_token_id") for config in configs]
    ids = [id_ for each in found for id_ in (each if isinstance(each, list) else [each])]
    texts = (tokenizer.added_token(id_) for id_ in ids if isinstance(id_, int))
    return {text for text in texts if text is not None}


def _refuse_other_ways(folder: Path, model: Json, config: Json) -> None:
    kinds = [model.get("model_type"), *(model.get("architectures") or ())]
    for kind in kinds:
        if kind in _OWN_RENDERERS:
            raise NotReproducible(
                f"{folder}: vLLM renders {kind} with its own {_OWN_RENDERERS[kind]} code, "
                "not with the chat template"
            )
    if any(folder.glob("consolidated*.safetensors")) and (
        (folder / "tekken.json").exists() or any(folder.glob("tokenizer.model.v*"))
    ):
        raise NotReproducible(f"{folder}: vLLM uses Mistral's own tokenizer and renderer for it")
    code = config.get("auto_map") or {}
    if isinstance(code, list) or code.get("AutoTokenizer"):
        raise NotReproducible(f"{folder}: its tokenizer is Python code of its own (auto_map)")
    if not (folder / "tokenizer.json").exists():
        raise NotReproducible(
            f"{folder} has no tokenizer.json: slow tokenizers cannot be reproduced"
        )


def _tokenizer(folder: Path, config: Json, tokens: Mapping[str, AddedToken | str]) -> Tokenizer:
    try:
        core: Core = Core.from_file(str(folder / "tokenizer.json"))
    # The library raises a bare Exception.
    except Exception as error:
        raise NotReproducible(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    if getattr(core.model, "dropout", None):
        raise NotReproducible(f"{folder}: its tokenizer drops merges at random (dropout)")
    if config.get("split_special_tokens"):
        raise NotReproducible(f"{folder}: its tokenizer splits special tokens in text")
    core.add_tokens(_missing(core, config, tokens))
    return Tokenizer(core)


def _missing(core: Core, config: Json, tokens: Mapping[str, AddedToken | str]) -> list[AddedToken]:
    """Tokens that only the configuration knows, or knows otherwise, in transformers' order."""
    known = {repr(token) for token in core.get_added_tokens_decoder().values()}
    listed = sorted(
        ((int(id_), _added(token)) for id_, token in _listed(config).items()), key=itemgetter(0)
    )
    wanted = [token for _, token in listed if repr(token) not in known]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    for token in map(_added, [*tokens.values(), *(() if isinstance(extra, dict) else extra)]):
        contents = {t.content for t in (*core.get_added_tokens_decoder().values(), *wanted)}
        if token.content not in contents:
            wanted.append(token)
    return wanted


def _listed(config: Json) -> Json:
    listed: Json = config.get("added_tokens_decoder") or {}
    return listed


def _special_tokens(folder: Path, config: Json) -> dict[str, AddedToken | str]:
    """By name, as the template sees them; those of a model's own (`image_token`) as well."""
    named = dict(config)
    if "added_tokens_decoder" not in config:
        named |= _json(folder / "special_tokens_map.json")
    extra = named.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    return {
        name: _added(value)
        for name, value in named.items()
        if (name in _NAMED or name.endswith("_token"))
        and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
    }


def _added(token: Any) -> AddedToken:
    if isinstance(token, AddedToken):
        return token
    if isinstance(token, str):
        return AddedToken(token, special=True, normalized=False)
    fields = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(token["content"], **{name: token[name] for name in fields if name in token})


def _templates(folder: Path, config: Json) -> dict[str, str]:
    """By name. Files go before the configuration, and a processor's own file last."""
    sources: dict[str, str] = {}
    if (default := folder / "chat_template.jinja").exists():
        sources["default"] = default.read_text(encoding="utf-8")
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        sources[path.stem] = path.read_text(encoding="utf-8")
    if sources:
        return sources
    written = config.get("chat_template") or _json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(written, list):
        return {entry["name"]: entry["template"] for entry in written}
    return {"default": written} if isinstance(written, str) else {}


def _json(path: Path) -> Json:
    """An empty object where there is no such file."""
    try:
        content = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except orjson.JSONDecodeError as error:
        raise NotReproducible(f"{path} is no JSON: {error}") from error
    return content if isinstance(content, dict) else {}
