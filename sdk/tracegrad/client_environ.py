"""The environment variables in which clients look for the model's address and for a key: the one
list of them, for an agent's own process (`Rollout.environ`) and for this one
(`rollout(environ=True)`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from urllib.parse import urlsplit

from tracegrad.urls import is_on_this_machine

# Each is read by the vendor's own client; the others beside it by LiteLLM and LangChain.
_OPENAI_BASES = ("OPENAI_BASE_URL", "OPENAI_API_BASE")  # end in /v1
_ANTHROPIC_BASES = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "ANTHROPIC_API_URL")
_GOOGLE_BASES = ("GOOGLE_GEMINI_BASE_URL",)
_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY")
# Keys that clients would send in place of those above, or beside them.
_OTHER_KEYS = ("ANTHROPIC_AUTH_TOKEN", "GOOGLE_API_KEY")
# Clients read one or the other.
_NO_PROXY = ("no_proxy", "NO_PROXY")
# Makes whatever a process opens held out, too (`context.is_held_out`).
HELD_OUT_VARIABLE = "TRACEGRAD_HELD_OUT"
# The admin's: whoever has it can give any rollout a reward.
_ADMIN_KEY = "TRACEGRAD_API_KEY"


def client_variables(base_url: str, api_key: str) -> dict[str, str | None]:
    """What makes clients call `base_url` (with `/v1`) with `api_key`; None: not to be set."""
    return {
        **dict.fromkeys(_OPENAI_BASES, base_url),
        **dict.fromkeys(_ANTHROPIC_BASES + _GOOGLE_BASES, base_url.removesuffix("/v1")),
        **dict.fromkeys(_KEYS, api_key),
        **dict.fromkeys(_OTHER_KEYS, None),
    }


def direct_variables(base_url: str, around: Mapping[str, str | None]) -> dict[str, str]:
    """What keeps clients from asking HTTP_PROXY for a `base_url` of this machine; empty for others.
    `around`: the environment that they are set in, whose own exceptions stay."""
    if not is_on_this_machine(base_url):
        return {}
    own = [each.strip() for name in _NO_PROXY for each in (around.get(name) or "").split(",")]
    hosts = [*filter(None, own), urlsplit(base_url).hostname or ""]
    return dict.fromkeys(_NO_PROXY, ",".join(dict.fromkeys(hosts)))


def subprocess_environ(base_url: str, api_key: str, *, held_out: bool = False) -> dict[str, str]:
    """A copy of `os.environ` with `client_variables` in it, and without the admin's key."""
    found = {name: value for name, value in os.environ.items() if name != _ADMIN_KEY}
    if held_out:
        found[HELD_OUT_VARIABLE] = "1"
    set_variables(found, client_variables(base_url, api_key))
    found |= direct_variables(base_url, found)
    return found


def set_variables(environ: MutableMapping[str, str], variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
