"""`tracegrad export --otlp`: what is stored, to a server that shows traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import typer

from tracegrad.cli.store_option import fail
from tracegrad.proxy.otel.rollout_spans import rewards_of_no_turn, rollout_spans
from tracegrad.proxy.otel.send_spans import NotSent, send_spans, traces_url
from tracegrad.store import RolloutFilter, Store
from tracegrad.store.copy.export_records import iter_rollouts
from tracegrad.text_format import format_count

FAILED = 1


def send_rollouts(
    store: Store,
    wanted: RolloutFilter,
    url: str,
    headers: Sequence[str],
    *,
    trained: bool | None,
    text: bool,
) -> None:
    """Rollout by rollout; what the server refuses is said, what it does not answer is the end."""
    url, sent_headers = traces_url(url), _headers(headers)
    records = iter_rollouts(store, wanted, trained=trained, raw=text, expert_routing=False)
    sent = left_out = 0
    made = Counter[str]()
    try:
        for record in records:
            spans = rollout_spans(record)
            made.update({"rollout": 1, "span": len(spans)})
            left_out += rewards_of_no_turn(record)
            sent += send_spans(url, sent_headers, spans)
    except NotSent as error:
        fail(f"{error} (sent before it: {format_count(sent, 'span')})", FAILED)
    what = ", ".join(format_count(n, kind) for kind, n in made.items()) or "nothing"
    typer.echo(f"sent {what} to {url}", err=True)
    if left_out:
        typer.echo(f"left out: no_such_turn ({format_count(left_out, 'reward')})", err=True)
    if refused := made["span"] - sent:
        typer.echo(f"refused there: {format_count(refused, 'span')}", err=True)


def _headers(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for header in given:
        name, equals, value = header.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{header!r}; write NAME=VALUE", param_hint="--header")
        if value.startswith("@"):  # so that a secret is in no list of processes
            try:
                value = Path(value[1:]).read_text().strip()
            except OSError as error:
                fail(f"{value[1:]}: {error.strerror}", FAILED)
        found[name.strip()] = value
    return found
