"""Facts of which one may be refused without the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tracegrad.events import Event
from tracegrad.proxy.capture.recorder import Recorder
from tracegrad.store.errors import EventRejected

log = logging.getLogger("tracegrad.proxy")


async def commit_each(recorder: Recorder, facts: Sequence[Event]) -> dict[int, str]:
    """Why some were refused, by their index; all others are stored. Raises Unavailable."""
    try:
        await recorder.commit(facts)
    except EventRejected as error:
        if len(facts) == 1:
            log.warning("a fact that a span tells of is refused: %s", error)
            return {0: str(error)}
    else:
        return {}
    refused: dict[int, str] = {}
    for index, fact in enumerate(facts):
        if problem := await commit_each(recorder, [fact]):
            refused[index] = problem[0]
    return refused
