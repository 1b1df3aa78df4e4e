"""Run by MLflow's Python: the spans of its server, by its own client. read_mlflow.py URL"""

from __future__ import annotations

import json
import sys
from typing import Any

import mlflow


def text(messages: Any) -> str | None:
    """Of the first message."""
    if not messages or not messages[0]["parts"]:
        return None
    found: str | None = messages[0]["parts"][0].get("content")
    return found


mlflow.set_tracking_uri(sys.argv[1])
spans: list[dict[str, Any]] = []
for trace in mlflow.search_traces(locations=["0"], return_type="list", max_results=100):
    for span in trace.data.spans:
        usage = span.get_attribute("mlflow.chat.tokenUsage") or {}
        spans.append(
            {
                "trace": trace.info.trace_id,
                "id": span.span_id,
                "parent": span.parent_id,
                "name": span.name,
                "kind": {"CHAT_MODEL": "LLM"}.get(span.span_type, span.span_type),
                "tokens": [usage.get("input_tokens"), usage.get("output_tokens")],
                "said": text(span.outputs),
                "asked": text(span.inputs),
                "events": [event.name for event in span.events],
            }
        )
print(json.dumps(spans))
