"""Bring a store's tables to the revision this code was written for."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from tracegrad.store.errors import StoreTooNew
from tracegrad.store.schema import REVISION


def migrate(connection: Connection) -> None:
    """In an exclusive transaction. Raises StoreTooNew."""
    if revision_of(connection) != REVISION:
        _upgrade(connection)


def revision_of(connection: Connection) -> str | None:
    """None: there are no tables of ours."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return found


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    found = revision_of(connection)
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise StoreTooNew(
            f"the store has revision {found}, this tracegrad knows up to {REVISION}: "
            "upgrade tracegrad"
        )
    command.upgrade(config, "head")
