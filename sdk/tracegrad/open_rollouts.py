"""Which rollouts are open in this process, and which of them `os.environ` leads to.

The environment is one for the whole process. While a rollout has set it (`rollout(environ=True)`)
no other one may be open beside it: its clients would send their calls to the wrong rollout, and the
proxy believes the URL before any header. One inside of it may: it sets its own and puts the outer
one's back.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager

from tracegrad import context
from tracegrad.client_environ import (
    HELD_OUT_VARIABLE,
    client_variables,
    direct_variables,
    set_variables,
)
from tracegrad.context import Rollout

# Reentrant: the collector may close a forgotten generator, and so its rollout, while it is held.
_lock = threading.RLock()
# Weak: a generator that is never closed must not keep its rollout open for good.
_open: weakref.WeakSet[Rollout] = weakref.WeakSet()
_holders: list[OpenRollout] = []  # whose environment it is; the innermost last


class OpenRollout(AbstractContextManager[None]):
    """Open until it is left. With `environ`, or inside of a rollout that has it, `os.environ` leads
    clients to it; leaving puts back what was there, except what the agent changed meanwhile.

    Raises:
        ValueError: another rollout is open beside it, and one of the two has the environment.
    """

    def __init__(self, rollout: Rollout, *, environ: bool) -> None:
        self.rollout = rollout
        self._before: dict[str, str | None] = {}
        self._ours: dict[str, str | None] = {}
        around = set(rollout.around())
        with _lock:
            holder = _holders[-1].rollout if _holders else None
            if holder is not None and holder not in around:
                raise _beside(holder)
            # Where the proxy would refuse the rollout's key the agent's own stays.
            environ = (environ or holder is not None) and not rollout.foreign
            if environ and (others := [each for each in _open if each not in around]):
                raise _beside(others[0])
            _open.add(rollout)
            if environ:
                _holders.append(self)
                self._ours = client_variables(rollout.base_url, rollout.api_key)
                self._ours |= direct_variables(rollout.base_url, os.environ)
                if rollout.held_out:
                    self._ours[HELD_OUT_VARIABLE] = "1"
                self._before = {name: os.environ.get(name) for name in self._ours}
                set_variables(os.environ, self._ours)

    def __exit__(self, *error: object) -> None:
        with _lock:
            _open.discard(self.rollout)
            if self in _holders:
                self._give_back()

    def _give_back(self) -> None:
        """To `os.environ`; or to the rollout inside of this one that is open yet (a thread's or a
        task's), which will put back what was there before both."""
        place = _holders.index(self)
        _holders.remove(self)
        inner = _holders[place] if place < len(_holders) else None
        now = os.environ if inner is None else inner._before
        untouched = [name for name, value in self._ours.items() if now.get(name) == value]
        before = {name: self._before[name] for name in untouched}
        if inner is None:
            set_variables(os.environ, before)
        else:
            inner._before |= before


def _beside(other: Rollout) -> ValueError:
    return ValueError(
        f"environ: rollout {other.id} is open beside this one, and os.environ is one for the whole "
        "process: calls would land in the wrong rollout. Run one after the other; or leave "
        "environ=True out and give clients base_url=rollout.base_url; or run the agents in "
        "processes of their own, with env=rollout.environ"
    )


def _after_fork_in_child() -> None:
    """Other threads' rollouts are not open here; what the forking code is in is."""
    global _lock, _open
    here = context.current()
    mine = [here, *here.around()] if here is not None else []
    _lock, _open = threading.RLock(), weakref.WeakSet(mine)
    for holder in _holders[::-1]:
        if holder.rollout not in mine:
            holder._give_back()


os.register_at_fork(after_in_child=_after_fork_in_child)
