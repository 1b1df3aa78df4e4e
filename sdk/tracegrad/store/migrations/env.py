"""Alembic's entry: runs migrations on the connection that `tracegrad.store.migrate` opened."""

from __future__ import annotations

from alembic import context

from tracegrad.store.models import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
context.run_migrations()
