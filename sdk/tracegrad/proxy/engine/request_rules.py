"""What a request may ask of the engine: which fields reach it, and what it fetches for a client.

Agents send fields of newer versions of their vendor's API than anybody knows here; the engine has
fields by which one request runs code of a template, loads tensors, or takes the engine for
itself. So the documented fields and plain sampling settings pass, the dangerous ones are refused
by name, and any other is left out, counted, and said once in the log. Whoever has the admin key
may send them all, and so may everybody with `pass_unknown_fields`.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import orjson

from tracegrad.chat.call import Call
from tracegrad.chat.sampling_params import DEFAULTS
from tracegrad.events import Json
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.dialects.body_checks import json_object
from tracegrad.proxy.dialects.openai_chat import check_messages
from tracegrad.proxy.http.errors import BadRequest

log = logging.getLogger("tracegrad.proxy")

# OpenAI's, of chat completions and text completions (openai 2.x).
_OPENAI = (
    *("audio", "best_of", "echo", "frequency_penalty", "function_call", "functions", "logit_bias"),
    *("logprobs", "max_completion_tokens", "max_tokens", "messages", "metadata", "modalities"),
    *("model", "moderation", "n", "parallel_tool_calls", "prediction", "presence_penalty"),
    *("prompt", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("reasoning_effort", "response_format", "safety_identifier", "seed", "service_tier", "stop"),
    *("store", "stream", "stream_options", "suffix", "temperature", "tool_choice", "tools"),
    *("top_logprobs", "top_p", "user", "verbosity", "web_search_options"),
)
# vLLM 0.32's about sampling and rendering that cost no more than an ordinary request.
_VLLMS = (
    *DEFAULTS,
    *("add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words"),
    *("chat_template_kwargs", "continue_final_message", "documents", "guided_choice"),
    *("guided_json", "ignore_eos", "include_reasoning", "include_stop_str_in_output"),
    *("length_penalty", "min_tokens", "repetition_detection", "return_token_ids"),
    *("return_tokens_as_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
    *("stop_token_ids", "structured_outputs", "thinking_token_budget", "truncate_prompt_tokens"),
    *("truncation_side", "watermarking"),
)
ALLOWED_FIELDS = frozenset((*_OPENAI, *_VLLMS))
# Of embeddings: OpenAI's, and vLLM's plain ones.
ALLOWED_EMBEDDING_FIELDS = frozenset(
    (
        *("add_special_tokens", "dimensions", "embed_dtype", "encoding_format", "endianness"),
        *("input", "model", "normalize", "truncate_prompt_tokens", "truncation_side", "user"),
    )
)
# What each of them would let a client do to the engine, or to others.
REFUSED_FIELDS = {
    "cache_salt": "it decides whose cached prompts are shared",
    "chat_template": "it is a program that the engine runs",
    "guided_grammar": "a grammar may take the engine without end",
    "guided_regex": "an expression may take the engine without end",
    "logits_processors": "it names code that the engine runs",
    "logprob_token_ids": "it multiplies every answer",
    "media_io_kwargs": "it decides how much of a video is unpacked",
    "mm_payload": "it hands tensors to the engine",
    "mm_processor_kwargs": "it decides how much memory an image takes",
    "priority": "it goes before other agents' calls",
    "prompt_embeds": "it hands tensors to the engine",
    "prompt_logprobs": "it multiplies every answer",
    "use_beam_search": "it multiplies the engine's work",
    "vllm_xargs": "it goes to the engine's plug-ins unchecked",
}
_STRUCTURES = frozenset(("json", "json_object", "choice", "disable_any_whitespace"))
_TENSORS = frozenset(("audio_embeds", "image_embeds", "image_pil", "prompt_embeds", "video_embeds"))
# OpenAI's own bounds: of one prompt, and of a list of prompts.
_MOST_CHOICES = 128
_MOST_PROMPTS = 2048
_FORMATS = ("json_object", "json_schema", "text")
_FIX = "leave it out, send it with the admin key, or set pass_unknown_fields of [proxy]"

# URL parsers skip control characters and spaces before a scheme, and line breaks and tabs anywhere.
_SKIPPED = "".join(map(chr, range(0x21)))
_scheme = re.compile(r"([a-z][a-z0-9+.\t\r\n-]*+):[\t\r\n]*+(/[\t\r\n]*+/)?", re.IGNORECASE)
# With or without slashes behind.
_FETCHED = ("file", "ftp", "http", "https")
# No user, no odd characters: parsers do not agree on where those put the host.
_link = re.compile(r"https?://([a-z0-9._-]+)(?::[0-9]{1,5})?(?:[/?#][!-\[\]-~]*)?", re.IGNORECASE)
_PLAIN_TEXT = frozenset(("type", "text"))
# Names under which a text part says something; the engine fetches none of it.
_SAID = frozenset(("text", "thinking", "refusal"))
_FIELDS_NAMED = 200


class RequestRules:
    """`left_out` counts, by name, the fields that did not reach the engine."""

    def __init__(self, *, pass_unknown: bool, media_domains: frozenset[str]) -> None:
        self._pass_unknown = pass_unknown
        self._media_domains = media_domains
        self.dropped_fields: Counter[str] = Counter()

    @classmethod
    def of(cls, settings: ProxySettings) -> Self:
        return cls(
            pass_unknown=settings.pass_unknown_fields,
            media_domains=frozenset(settings.allowed_media_domains),
        )

    def apply(self, call: Call, *, admin: bool) -> Call:
        """The call as the engine may get it; what the client sent stays in its record. Raises
        BadRequest that names the field."""
        self._check_media(call.messages)
        if admin or self._pass_unknown:
            return call
        _check_known(call)
        body = self._known(call.body, ALLOWED_FIELDS)
        return call if body is call.body else replace(call, body=body)

    def embeddings(self, raw: bytes, *, admin: bool) -> bytes:
        """As `apply`, for a body of `/v1/embeddings`: engines embed conversations and media too."""
        body = json_object(raw)
        if (messages := body.get("messages")) is not None:
            check_messages(messages)
            self._check_media(messages)
        given = body.get("input")
        for number, part in enumerate(given if isinstance(given, list) else ()):
            if isinstance(part, dict):
                self._check_part(part, f"input[{number}]")
        if admin or self._pass_unknown:
            return raw
        known = self._known(body, ALLOWED_EMBEDDING_FIELDS)
        return raw if known is body else orjson.dumps(known)

    def _known(self, body: Json, passed: frozenset[str]) -> Json:
        unknown = body.keys() - passed
        if not unknown:
            return body
        for name in unknown:
            if name in REFUSED_FIELDS and body[name]:  # empty, it asks for nothing
                raise _refused(name, REFUSED_FIELDS[name])
            self._count(name)
        return {name: value for name, value in body.items() if name in passed}

    def _count(self, name: str) -> None:
        name = name[:64]
        if name not in self.dropped_fields and len(self.dropped_fields) >= _FIELDS_NAMED:
            name = "(others)"
        self.dropped_fields[name] += 1
        count = self.dropped_fields[name]
        if count in (1, 100, 10_000, 1_000_000):
            log.warning(
                "the field %r of %d requests is not known and does not reach the engine"
                " (pass_unknown_fields)",
                name,
                count,
            )

    def _check_media(self, messages: list[Json]) -> None:
        for index, message in enumerate(messages):
            content = message.get("content")
            if not isinstance(content, list):
                continue
            for number, part in enumerate(content):
                if isinstance(part, dict) and not part.keys() <= _PLAIN_TEXT:
                    self._check_part(part, f"messages[{index}].content[{number}]")

    def _check_part(self, part: Json, where: str) -> None:
        """Whatever its type: the engine goes by other fields where it finds them."""
        if tensors := _TENSORS & {part.get("type"), *part}:
            raise BadRequest(
                f"{where}: {min(map(str, tensors))} is not served; send the media", param=where
            )
        for name, value in part.items():
            if name in _SAID:
                continue
            for text in _texts(value):
                self._check_reference(text, f"{where}.{name}")

    def _check_reference(self, text: str, where: str) -> None:
        found = _scheme.match(text.lstrip().lstrip(_SKIPPED))
        if found is None:
            return
        scheme = "".join(found[1].lower().split())
        if scheme == "data" or (found[2] is None and scheme not in _FETCHED):
            return  # the data itself, or a name with a colon in it
        link = _link.fullmatch(text) if len(text) <= 8192 else None
        if link is not None and link[1].lower().rstrip(".") in self._media_domains:
            return
        raise BadRequest(
            f"{where}: {text[:80]!r} is not fetched: send the data itself (data: URL), or have its"
            " host named in allowed_media_domains of [proxy]",
            param=where,
            code="media_domain_not_allowed",
        )


def _check_known(call: Call) -> None:
    """Fields that pass, with what they must not hold."""
    body = call.body
    if call.n > _MOST_CHOICES:
        raise BadRequest(f"n is more than {_MOST_CHOICES}", param="n")
    if call.n * _prompts(body.get("prompt")) > _MOST_PROMPTS:
        raise BadRequest(
            f"prompt asks for more than {_MOST_PROMPTS} completions (its prompts times n): send"
            " several requests",
            param="prompt",
        )
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type", "text") not in _FORMATS:
        why = f"served are {', '.join(_FORMATS)}; others may take the engine without end"
        raise _refused("response_format.type", why)
    structure = body.get("structured_outputs")
    if isinstance(structure, dict):
        for name in structure.keys() - _STRUCTURES:
            if structure[name] is not None:
                raise _refused(f"structured_outputs.{name}", "it may take the engine without end")
    kwargs = body.get("chat_template_kwargs")
    if isinstance(kwargs, dict):
        for name, value in kwargs.items():
            if name in ("chat_template", "tokenize") or isinstance(value, dict | list):
                why = "of template arguments only texts, numbers, true and false are served"
                raise _refused(f"chat_template_kwargs.{name[:64]}", why)


def _refused(name: str, why: str) -> BadRequest:
    return BadRequest(
        f"{name} is not served: {why}; {_FIX}", param=name, code="unsupported_parameter"
    )


def _prompts(prompt: Any) -> int:
    """How many prompts a text completion asks about; token ids are one."""
    many = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return len(prompt) if many else 1


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value, in the time that its size takes, however deep they are."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found
