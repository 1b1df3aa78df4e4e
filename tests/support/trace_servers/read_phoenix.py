"""Run by Phoenix's Python: the spans of its server, by its own client. read_phoenix.py URL"""

from __future__ import annotations

import json
import sys
from typing import Any

from phoenix.client import Client

spans: list[dict[str, Any]] = [
    {
        "trace": span["context"]["trace_id"],
        "id": span["context"]["span_id"],
        "parent": span.get("parent_id"),
        "name": span["name"],
        "kind": span["span_kind"],
        "tokens": [
            span["attributes"].get("llm.token_count.prompt"),
            span["attributes"].get("llm.token_count.completion"),
        ],
        "said": span["attributes"].get("llm.output_messages.0.message.content"),
        "asked": span["attributes"].get("llm.input_messages.0.message.content"),
        "events": [event["name"] for event in span.get("events", ())],
    }
    for span in Client(base_url=sys.argv[1]).spans.get_spans(
        project_identifier="default", limit=1000
    )
]
print(json.dumps(spans))
