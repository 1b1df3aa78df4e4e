"""A rollout that is opened in one process, around a function that runs in another one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from opentelemetry import context as otel_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tracegrad import context, exporter, http_patching, thread_patching
from tracegrad.context import Rollout
from tracegrad.events import Event
from tracegrad.transport import api_key


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRollout:
    """All that the other process needs, which is trusted as this one is: `admin_key` is
    TRACEGRAD_API_KEY. The rollout's end stays with whoever opened it."""

    rollout_id: str
    task_id: str | None
    url: str
    admin_key: str | None = field(repr=False)
    held_out: bool
    tags: Mapping[str, str]
    span: Mapping[str, str]  # that is current: W3C's headers

    @classmethod
    def of(cls, opened: Rollout) -> Self:
        """Of the code that calls this. Raises ValueError, as `rollout`."""
        span: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(span)
        return cls(
            rollout_id=opened.id,
            task_id=opened.task_id,
            url=opened.url,
            admin_key=api_key(),
            held_out=opened.held_out,
            tags=context.current_tags(),
            span=span,
        )

    @contextmanager
    def entered(self, emit: Callable[[Event], None]) -> Iterator[Rollout]:
        """The code under `with` is in it, and so is what it opens of its own (TRACEGRAD_URL and
        TRACEGRAD_API_KEY are this rollout's from now on). `emit` gets what is said of it."""
        os.environ["TRACEGRAD_URL"] = self.url
        os.environ.pop("TRACEGRAD_API_KEY", None)
        if self.admin_key is not None:
            os.environ["TRACEGRAD_API_KEY"] = self.admin_key
        here = Rollout(
            task_id=self.task_id,
            url=self.url,
            emit=emit,
            drop=lambda reason: exporter.exporter(self.url).drop(reason),
            admin_key=self.admin_key,
            rollout_id=self.rollout_id,
            held_out=self.held_out,
        )
        http_patching.install()
        thread_patching.install()
        span = otel_context.attach(TraceContextTextMapPropagator().extract(self.span))
        try:
            with context.tags(self.tags), context.use_rollout(here):
                yield here
        finally:
            otel_context.detach(span)
            here.leave()
