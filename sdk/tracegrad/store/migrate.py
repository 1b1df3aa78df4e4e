"""Bring a store's tables to the revision this code was written for."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from tracegrad.store.dialect import for_writing
from tracegrad.store.errors import StoreTooNew
from tracegrad.store.schema import REVISION


def migrate(engine: Engine) -> None:
    with engine.connect() as connection:
        if _revision(connection) == REVISION:
            return
    # The write lock is held over check and change: processes that open at once take turns.
    with for_writing(engine).begin() as connection:
        if _revision(connection) != REVISION:
            _upgrade(connection)


def _revision(connection: Connection) -> str | None:
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
    found = _revision(connection)
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise StoreTooNew(
            f"the store has revision {found}, this tracegrad knows up to {REVISION}: "
            "upgrade tracegrad"
        )
    command.upgrade(config, "head")
