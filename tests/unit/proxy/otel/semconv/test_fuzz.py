"""Whatever an LLM span holds, it is read as messages that can be read again."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from support.proxy.genai_spans import (
    OPENINFERENCE,
    OTEL,
    OTEL_TEXTS,
    REQUEST,
    RESPONSE,
    TRACELOOP,
    WHOLE,
    span,
)
from tracegrad.events import Turn, logprob_array, token_id_array
from tracegrad.proxy.dialects.registry import call_of
from tracegrad.proxy.otel.semconv import llm_call
from tracegrad.proxy.otel.semconv.flat_attributes import EVENTS

NAMES = sorted({"llm.request.type", *OTEL, *OTEL_TEXTS, *TRACELOOP, *OPENINFERENCE, *WHOLE, EVENTS})
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)  # which OTLP's reader makes texts of
    | st.text()
    | st.sampled_from(
        [json.dumps(REQUEST), json.dumps(RESPONSE), "[{}]", "[[1]]", "[NaN]", "LLM", "chat"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["parts", "type", "role", "content", "name", "attributes", "text"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    attributes=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=12),
    kind=st.sampled_from(
        [{"openinference.span.kind": "LLM"}, {"gen_ai.operation.name": "chat"}, {}]
    ),
    encoded=st.booleans(),
)
def test_whatever_a_span_holds_is_read_as_messages_that_can_be_read_again(
    attributes: dict[str, Any], kind: dict[str, str], encoded: bool
) -> None:
    if encoded:
        # As most libraries do, since attributes hold no objects.
        attributes = {
            name: value if isinstance(value, str | int | float) else json.dumps(value)
            for name, value in attributes.items()
        }
    call = llm_call(span(attributes | kind))
    if call is None or not call.request["messages"]:
        return
    turn = Turn(
        rollout_id="r",
        dialect="otel",
        model=call.model,
        prompt_token_ids=token_id_array(),
        completion_token_ids=token_id_array(),
        completion_logprobs=logprob_array(),
        policy_versions=(),
        request=call.request,
        response=call.response,
    )
    again = call_of(turn)
    assert again is not None, call.request
    assert again.messages == call.request["messages"]
