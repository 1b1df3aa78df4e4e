"""What can go wrong with the store. Every message is one line that a person can act on."""

from __future__ import annotations


class StoreError(Exception):
    """Base of every error the store raises on purpose."""


class StoreUnavailable(StoreError):
    """The store cannot be read or written now (disk full, locked, no such folder, damaged).

    Nothing of the failed call was stored, unless the connection to a server broke in the very
    commit; the same call may succeed later.
    """


class StoreLost(StoreUnavailable):
    """The server of the store is gone, or starts: it is likely to be back soon."""


class StoreBusy(StoreUnavailable):
    """Too much waits to be written already: this was not even queued."""


class StoreMissing(StoreUnavailable):
    """There is no store at the URL, and the caller did not ask to create one."""


class StoreTooNew(StoreError):
    """The store was written by a later version of tracegrad."""


class StoreTooOld(StoreError):
    """The store was written before the first release, in a form that is not read any more."""


class StoreForeign(StoreError):
    """Another program's tables are there: any in a file, on a server some with names of ours."""


class StoreCorrupt(StoreError):
    """What is stored cannot be what was written."""


class EventRejected(StoreError, ValueError):
    """An event contradicts itself or the store; it was not stored. Names the field."""


class ParentMissing(EventRejected):
    """The turn that a turn continues is not stored: it never was, or was removed since."""


class RolloutTaken(EventRejected):
    """The rollout that a turn was inferred to belong to was closed when it was idle, and training
    has it, or had it: the turn belongs into another one."""


class UnknownRollout(StoreError, LookupError):
    """No rollout has this id or begins with it."""


class AmbiguousRollout(StoreError, LookupError):
    """Several rollouts begin with this id."""


class LedgerError(StoreError):
    """The ledger refused a record; nothing of it was stored."""


class AlreadyTrained(LedgerError):
    """A turn of the step is in the ledger already; the whole step was rolled back."""


class LeaseLost(LedgerError):
    """A rollout is no longer under the lease that it was given out under: the lease ended, and
    another trainer has it, or nobody. The whole record was rolled back."""
