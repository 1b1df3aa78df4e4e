"""Bring a store's tables to the revision this code was written for."""

from __future__ import annotations

import logging
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from tracegrad.store.errors import StoreForeign, StoreTooNew, StoreTooOld
from tracegrad.store.models import REVISION, Base

log = logging.getLogger("tracegrad.store")

_VERSIONS = "alembic_version"
_FIRST = "rollouts"  # a table of ours in every revision
_BASELINE = "0009"


def migrate(connection: Connection) -> None:
    """In an exclusive transaction. Raises StoreTooNew, StoreTooOld, StoreForeign."""
    if revision_of(connection) != REVISION:
        _upgrade(connection)


def revision_of(connection: Connection) -> str | None:
    """None: there are no tables of ours."""
    inspector = inspect(connection)
    if not (inspector.has_table(_VERSIONS) and inspector.has_table(_FIRST)):
        return None
    found: str | None = connection.scalar(text(f"SELECT version_num FROM {_VERSIONS}"))
    return found


def _upgrade(connection: Connection) -> None:
    _quiet_alembic()
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    found = revision_of(connection)
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is None:
        _refuse_foreign(connection)
    elif found < _BASELINE:
        raise StoreTooOld(
            f"the store has revision {found}, from before the first release: open it once with"
            f" commit ee1289f of tracegrad, which brings it to {_BASELINE}, or give another URL"
        )
    elif found not in known:
        raise StoreTooNew(
            f"the store has revision {found}, this tracegrad knows up to {REVISION}: "
            "upgrade tracegrad"
        )
    command.upgrade(config, "head")
    if found is not None:
        log.info("the store has been brought from revision %s to %s", found, REVISION)


def _quiet_alembic() -> None:
    """It tells of its own parts, from its first import on."""
    logger = logging.getLogger("alembic")
    if logger.level == logging.NOTSET:  # else somebody has said what is wanted of it
        logger.setLevel(logging.WARNING)


def _refuse_foreign(connection: Connection) -> None:
    """Tables that we would make, made by somebody else."""
    there = set(inspect(connection).get_table_names())
    if foreign := sorted(there & {_VERSIONS, *Base.metadata.tables}):
        raise StoreForeign(
            f"the database holds another program's tables ({', '.join(foreign)}): "
            "give the store a database of its own"
        )
