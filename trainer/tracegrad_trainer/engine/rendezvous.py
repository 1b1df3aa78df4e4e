"""Which processes become one group: those that are alive now, none of an earlier attempt.

torchrun keeps one store for all restarts of its ranks, and torch puts nothing of the attempt before
the keys: ranks that begin again would read the addresses of dead ones and wait for them. Launchers
of several hosts do not begin again together either; one of them may be new in the store of another
that has not noticed yet.

So rank 0 calls, under a new name each time, and every rank answers with a name of its process. Once
all have answered the same call rank 0 lets just these processes go, and the keys of their group
stand behind the call's name. Calls are short: who answered one is hardly dead when it ends.
"""

from __future__ import annotations

import json
import logging
import os
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from tracegrad.events import new_id

logger = logging.getLogger(__name__)

_CALL = "tracegrad/call"
_CALL_S = 2.0
_POLL_S = 0.02
_REPORT_S = 30.0


def meet_ranks(timeout: timedelta) -> tuple[Store, int, int]:
    """By torchrun's variables -> a store for this group alone, this rank, the number of ranks.

    Raises:
        OSError: some rank does not come in time, or the store is gone.
    """
    try:
        store, rank, ranks = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        return meet(store, rank, ranks, timeout), rank, ranks
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        said = str(error).partition("\n")[0]
        raise ConnectionError(f"rank 0's host, {where}, answers no more: {said}") from error


def meet(store: Store, rank: int, ranks: int, timeout: timedelta) -> Store:
    """`store` for the processes that call this now. Raises TimeoutError."""
    end = time.monotonic() + timeout.total_seconds()
    call = _gather(store, ranks, end) if rank == 0 else _follow(store, rank, end)
    return PrefixStore(call, store)


def _gather(store: Store, ranks: int, end: float) -> str:
    """Rank 0: the call that every other rank answered."""
    others = range(1, ranks)
    reported = time.monotonic()
    while True:
        call = new_id()
        answers = {rank: _answer(call, rank) for rank in others}
        store.set(_CALL, call)
        absent = _await_answers(store, answers)
        if not absent:
            present = [store.get(key).decode() for key in answers.values()]
            store.set(_go(call), json.dumps(present))
        for key in answers.values():
            store.delete_key(key)
        if not absent:
            return call
        missing = f"{len(absent)} of {ranks} ranks are not there: {', '.join(map(str, absent))}"
        if time.monotonic() > end:
            raise TimeoutError(f"{missing}; has each host a launcher, and do its ranks start?")
        if time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            logger.warning("%s; waiting for them", missing)


def _await_answers(store: Store, answers: dict[int, str]) -> list[int]:
    """The ranks that did not answer."""
    end = time.monotonic() + _CALL_S
    while answers and not store.check(list(answers.values())):
        if time.monotonic() > end:
            return [rank for rank, key in answers.items() if not store.check([key])]
        time.sleep(_POLL_S)
    return []


def _follow(store: Store, rank: int, end: float) -> str:
    """Another rank: the call that rank 0 let this process go with."""
    me, answered = new_id(), ""
    while time.monotonic() < end:
        if store.check([_CALL]):
            call: str = store.get(_CALL).decode()
            if call != answered:
                store.set(_answer(call, rank), me)
                answered = call
            # The newest call may be one of a group that is dead: it let go others.
            if store.check([_go(call)]) and me in json.loads(store.get(_go(call))):
                return call
        time.sleep(_POLL_S)
    raise TimeoutError(f"rank 0 did not call rank {rank}: is its host's launcher at work?")


def _answer(call: str, rank: int) -> str:
    return f"tracegrad/answer/{call}/{rank}"


def _go(call: str) -> str:
    return f"tracegrad/go/{call}"
