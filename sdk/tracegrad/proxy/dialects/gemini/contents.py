"""The contents of a Gemini request as canonical messages.

Contents of one role that follow each other are one turn. Of a user turn, function responses come
first, one `tool` message each; of a model turn, text, thoughts and calls are three fields, so
their order among each other is not kept. Thought signatures have no effect: Gemini CLI makes
its own where it got none.

Calls that come without an id get one of their own, always the same for the same contents. A
response without an id answers the first call of its name that has none yet.
"""

from __future__ import annotations

import binascii
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from typing import Literal

import orjson

from tracegrad.chat.content_parts import content_of, media_part, text_part
from tracegrad.events import Json
from tracegrad.proxy.dialects import tool_arguments
from tracegrad.proxy.dialects.gemini.json_field import GeminiJsonField

# What a part may have beside its data.
_BESIDE = ("thought", "thoughtSignature", "partMetadata")
_DATA = ("text", "inlineData", "fileData", "functionCall", "functionResponse")
_KINDS: dict[str, Literal["image", "audio", "video"]] = {
    "image": "image",
    "audio": "audio",
    "video": "video",
}


def system_of(given: GeminiJsonField | None) -> list[Json]:
    """The system message of `systemInstruction`; none where it says nothing. Its role is not
    read: clients write all sorts of things there."""
    parts = given.get("parts") if given else None
    texts = [part.require("text").text() for part in parts.items()] if parts else []
    return [{"role": "system", "content": "\n".join(texts)}] if any(texts) else []


def messages_of(given: GeminiJsonField) -> list[Json]:
    contents = given.items()
    if not contents:
        raise given.error("is empty")
    messages: list[Json] = []
    calls = _Calls()
    for role, turn in groupby(contents, key=_role):
        parts = [part for content in turn for part in _parts(content)]
        if role == "model":
            messages.append(_assistant(parts, calls))
        else:
            messages += _user(parts, calls)
    return messages


def refuse_open_end(given: GeminiJsonField) -> None:
    """Contents that are to be answered end with the user's."""
    last = given.items()[-1]
    if _role(last) == "model":
        raise last.error(
            "is of role 'model', and it is the last; contents must end with a user turn or with "
            "function responses"
        )


class _Calls:
    """The function calls so far, and which of them have a response. In the time that their number
    takes: there may be a hundred thousand."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._answered: set[int] = set()
        # Places in `_ids`, in order: by id, by name, and (None) of all.
        self._by_id: dict[str, list[int]] = {}
        self._by_name: dict[str | None, deque[int]] = {None: deque()}

    def add(self, given_id: str | None, name: str) -> str:
        place = len(self._ids)
        call_id = given_id or f"call_{place}"
        self._ids.append(call_id)
        self._by_id.setdefault(call_id, []).append(place)
        for key in (name, None):
            self._by_name.setdefault(key, deque()).append(place)
        return call_id

    def answer(self, response: GeminiJsonField) -> str:
        """The id of the call that this is the response of."""
        given_id = response.get("id")
        name = response.get("name")
        if given_id is not None and given_id.text():
            self._answered.update(self._by_id.pop(given_id.text(), ()))
            return given_id.text()
        waiting = self._by_name.get(None if name is None else name.text(), deque())
        while waiting:
            place = waiting.popleft()
            if place not in self._answered:
                self._answered.add(place)
                return self._ids[place]
        raise response.error("answers no functionCall before it")


def _role(content: GeminiJsonField) -> str:
    role = content.get("role")
    if role is None or not role.text():
        return "user"
    known = role.one_of(("user", "model", "function"))
    return "user" if known == "function" else known


def _parts(content: GeminiJsonField) -> list[GeminiJsonField]:
    content.refuse_all_but(("role", "parts"))
    parts = content.get("parts")
    if parts is None and _role(content) == "user":
        raise content.error("has no parts")
    return parts.items() if parts else []


def _data(part: GeminiJsonField) -> GeminiJsonField:
    """The one field of a part that is its data."""
    part.refuse_all_but((*_BESIDE, *_DATA))
    found = [field for name in _DATA if (field := part.get(name)) is not None]
    if len(found) != 1:
        raise part.error(f"has not exactly one of {', '.join(_DATA)}")
    return found[0]


def _assistant(parts: list[GeminiJsonField], calls: _Calls) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    called: list[Json] = []
    for part in parts:
        data = _data(part)
        if data.named("text"):
            thought = part.get("thought")
            is_thought = thought is not None and thought.flag()
            (thoughts if is_thought else texts).append(data.text())
        elif data.named("functionCall"):
            called.append(_call(data, calls))
        else:
            raise data.error("is not served in a turn of the model")
    message: Json = {"role": "assistant", "content": "".join(texts) or None}
    if reasoning := "".join(thoughts):
        message["reasoning"] = reasoning
    if called:
        message["tool_calls"] = called
    return message


def _call(call: GeminiJsonField, calls: _Calls) -> Json:
    call.refuse_all_but(
        ("id", "name", "args"), {"partialArgs": "send args", "willContinue": "send args"}
    )
    name = call.require("name").text()
    given_id = call.get("id")
    args = call.get("args")
    return {
        "id": calls.add(given_id.text() if given_id else None, name),
        "type": "function",
        "function": {
            "name": name,
            "arguments": tool_arguments.as_text(args.object()) if args else "{}",
        },
    }


def _user(parts: list[GeminiJsonField], calls: _Calls) -> Iterator[Json]:
    results: list[Json] = []
    said: list[Json] = []
    for part in parts:
        data = _data(part)
        if data.named("functionResponse"):
            results.append(_response(data, calls))
        elif data.named("text"):
            said.append(text_part(data.text()))
        elif data.named("functionCall"):
            raise data.error("is not served in a turn of the user")
        else:
            said.append(_media(data))
    yield from results
    if said or not results:
        yield {"role": "user", "content": content_of(said)}


def _response(response: GeminiJsonField, calls: _Calls) -> Json:
    response.refuse_all_but(
        ("id", "name", "response", "parts", "scheduling"),
        {"willContinue": "a response is sent whole here"},
    )
    said: list[Json] = []
    told = response.get("response")
    if told is not None:
        said.append(text_part(_told(told.object())))
    media = response.get("parts")
    for part in media.items() if media else ():
        part.refuse_all_but(("inlineData", "fileData"))
        said.append(_media(part.get("inlineData") or part.require("fileData")))
    return {"role": "tool", "tool_call_id": calls.answer(response), "content": content_of(said)}


def _told(response: Json) -> str:
    """What a function returned: the text under `output`, or else the object as JSON."""
    output = response.get("output")
    if len(response) == 1 and isinstance(output, str):
        return output
    return orjson.dumps(response).decode()


def _media(data: GeminiJsonField) -> Json:
    """`inlineData` or `fileData`."""
    mime_type = data.require("mimeType")
    kind = _KINDS.get(mime_type.text().partition("/")[0])
    if kind is None:
        raise mime_type.error("is not of an image, audio or video; no other data is served")
    if data.named("fileData"):
        uri = data.require("fileUri")
        if not uri.text().startswith(("http://", "https://")) or "googleapis.com/" in uri.text():
            raise uri.error("is not a plain http(s) address; files at Google cannot be read here")
        return media_part(kind, uri.text())
    encoded = _base64(data.require("data"))
    return media_part(kind, f"data:{mime_type.text()};base64,{encoded}")


def _base64(data: GeminiJsonField) -> str:
    """In the standard alphabet: Google's clients also write the one for URLs."""
    text = data.text().translate(_STANDARD)
    text += "=" * (-len(text) % 4)
    try:
        binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError):
        raise data.error("is not base64") from None
    return text


_STANDARD = str.maketrans("-_", "+/")
