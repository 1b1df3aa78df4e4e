"""The proxy's HTTP interface: its OpenAPI document, and a page of its routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from tracegrad.proxy import create_app
from tracegrad.proxy.config import ProxySettings

PAGE, DOCUMENT = "reference/http.md", "reference/openapi.json"
INTRODUCTION = """\
# HTTP routes of the proxy

This page is made of the proxy's OpenAPI document, which a running proxy serves as `/openapi.json`;
[this copy](openapi.json) is of the same version as the page. [The proxy](../proxy.md) says what the
routes do, [access and keys](../proxy.md#access-and-keys) who may call which. Every path of LLM
calls is there a second time below `/rollouts/{rollout}`, for calls of that rollout.
"""
GROUPS = {
    "LLM calls": lambda path: path.startswith(("/v1/", "/v1beta/")) and path != "/v1/traces",
    "Spans": lambda path: path == "/v1/traces",
    "Control": lambda path: path.startswith("/api/"),
    "Health": lambda path: path in ("/healthz", "/metrics"),
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    document = openapi()
    text = json.dumps(document, indent=1)
    files.append(File.generated(config, PAGE, content=page(document)))
    files.append(File.generated(config, DOCUMENT, content=text))
    return files


def openapi() -> dict[str, Any]:
    """As it is served; describing routes takes no store."""
    store = Mock(current_version=lambda: 0)
    return create_app(ProxySettings(), store=store, writer=Mock()).openapi()


def page(document: dict[str, Any]) -> str:
    parts = [INTRODUCTION]
    left = {path: item for path, item in document["paths"].items() if "{rollout}/v" not in path}
    for title, belongs in GROUPS.items():
        own = {path: left.pop(path) for path in list(left) if belongs(path)}
        parts.append(_table(title, own))
    if left:
        parts.append(_table("Others", left))
    return "\n".join(parts)


def _table(title: str, paths: dict[str, Any]) -> str:
    return "\n".join(
        [f"## {title}\n", "| route | | body | answer |", "|---|---|---|---|", *_rows(paths), ""]
    )


def _rows(paths: dict[str, Any]) -> Iterator[str]:
    for path, item in paths.items():
        for method, operation in item.items():
            what = operation.get("summary") or operation.get("operationId", "")
            body = ", ".join(_names(operation.get("requestBody", {}).get("content", {})))
            answer = ", ".join(operation["responses"].get("200", {}).get("content", {}))
            yield f"| `{method.upper()} {path}` | {what} | {body} | {answer} |"


def _names(content: dict[str, Any]) -> Iterator[str]:
    for kind, media in content.items():
        schema = media.get("schema", {}).get("$ref", kind)
        yield f"`{schema.rsplit('/', 1)[-1]}`"
