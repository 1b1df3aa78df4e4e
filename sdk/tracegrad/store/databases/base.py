"""What the store asks of a database.

Three kinds of transactions, all of which see what was committed before they began:

- *reading*: one state of the store;
- *appending*: adds events, beside other appending ones where the database can;
- *exclusive*: the only exclusive one until it commits. Whatever it reads of leases, steps and the
  ledger stays true until then; events may be appended meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from sqlalchemy import URL, Connection, Engine, exc

from tracegrad.store.errors import StoreUnavailable

BUSY_TIMEOUT_S = 30.0

# Mistakes of ours, which must not look like a database that is away.
_PROGRAMMING_ERRORS = (exc.IntegrityError, exc.ProgrammingError, exc.DataError)


class Conflict(StoreUnavailable):
    """Another transaction came in between; the same one may succeed at once."""


class Database(ABC):
    def __init__(self, url: URL) -> None:
        self.url = url

    @abstractmethod
    def describe(self) -> str:
        """How messages name the store; no password in it."""

    @abstractmethod
    def prepare(self, *, create: bool) -> None:
        """Make room for a new store. Raises StoreMissing where there is none to open."""

    @abstractmethod
    def engine(self, *, busy_timeout_s: float) -> Engine:
        """`busy_timeout_s` bounds every wait for another's write."""

    @abstractmethod
    def reading(self, engine: Engine) -> AbstractContextManager[Connection]: ...

    @abstractmethod
    def appending(self, engine: Engine) -> AbstractContextManager[Connection]: ...

    @abstractmethod
    def exclusive(self, engine: Engine) -> AbstractContextManager[Connection]: ...

    @contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """The database's own failures as `StoreUnavailable`; mistakes of ours stay as they are."""
        try:
            yield
        except exc.DBAPIError as error:
            translated = self.translate_error(error)
            if translated is None:
                raise
            raise translated from error
        except exc.TimeoutError as error:
            raise self.unavailable("no free connection") from error

    def translate_error(self, error: exc.DBAPIError) -> StoreUnavailable | None:
        """What `error` means to a caller; None: it is a mistake of ours."""
        return None if isinstance(error, _PROGRAMMING_ERRORS) else self.unavailable(str(error.orig))

    def unavailable(self, reason: str) -> StoreUnavailable:
        return StoreUnavailable(self.line(reason))

    def line(self, reason: str) -> str:
        return f"store {self.describe()}: {' '.join(reason.split())}"
