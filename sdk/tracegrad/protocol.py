"""The words that SDK, proxy and trainer share on the wire: headers, paths, attributes, keys."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

DEFAULT_URL = "http://127.0.0.1:4141"
EVENTS_PATH = "/api/events"
FEEDBACK_PATH = "/api/feedback"
TRACES_PATH = "/v1/traces"
INTAKE_PATH = "/api/intake"
ANCHORS_PATH = "/api/anchors/next"
TASKS_PATH = "/api/tasks/check"
METRICS_PATH = "/metrics"

ROLLOUT_HEADER = "x-tracegrad-rollout"
KEY_HEADER = "x-tracegrad-key"
STATE_HEADER = "x-tracegrad-state"
AGENT_HEADER = "x-tracegrad-agent"  # `agent_header` of a name
MAX_AGENT_NAME = 200  # characters; more are cut off
MAX_MODEL_NAME = 200  # of the name that an agent asks for; as well
# Of printable ASCII all but "%", which writes the rest.
_HEADER_SAFE = " !#$&'()*+,/:;<=>?@[]^`{|}\""
# In `baggage` and on spans: whose they are.
ROLLOUT_ATTRIBUTE = "tracegrad.rollout"
# On LLM spans: whether the span made a turn ("turn"), or its call was one already ("recorded").
CALL_KIND_ATTRIBUTE = "tracegrad.call.kind"
# On LLM spans whose call was a turn already: which one, where their answer's id says it.
TURN_ATTRIBUTE = "tracegrad.turn"
# Spans of the runner's work around an agent: a sandbox is waited for and starts; it is scored.
SANDBOX_SPAN, REWARD_SPAN = "tracegrad.sandbox", "tracegrad.reward"

# The tag of a rollout that ran in an image: quarantine finds images by it.
IMAGE_TAG = "image"

ROLLOUT_ID_PATTERN = r"^[A-Za-z0-9._:@-]{1,128}$"
# As an API key, `tg-<rollout>` names a rollout; with a dot and 32 bytes of secret it proves one.
API_KEY_PREFIX = "tg-"
# A rollout's id may hold dots; a secret holds none, and 32 bytes make 43 characters.
SECRET_KEY = re.compile(r"tg-([A-Za-z0-9._:@-]{1,128})\.[A-Za-z0-9_-]{43}")


def agent_header(name: str) -> str:
    """The header's value for an agent's name: percent-encoded UTF-8."""
    return quote(name, safe=_HEADER_SAFE)


def agent_of_header(value: str | None) -> str | None:
    return unquote(value or "")[:MAX_AGENT_NAME] or None
