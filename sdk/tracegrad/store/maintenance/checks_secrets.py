"""Passwords that earlier versions wrote into the settings of steps, as part of the store's URL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, select, update

from tracegrad.store.maintenance.findings import Finding
from tracegrad.store.models import Steps
from tracegrad.urls import masked


def secret_checks(connection: Connection) -> Iterator[Finding]:
    for step, _ in _with_passwords(connection):
        yield Finding(
            check="secrets",
            subject=f"step {step}",
            message="its settings hold the password of a URL",
            fix="tracegrad doctor --fix takes it out; change the password too: whoever has read"
            " the store, or has a copy, knows it",
        )


def remove_passwords(connection: Connection) -> int:
    """Of how many steps."""
    if connection.dialect.name == "sqlite":
        # Else what was replaced stays readable in the file.
        connection.exec_driver_sql("PRAGMA secure_delete=ON")
    found = list(_with_passwords(connection))
    for step, settings in found:
        connection.execute(update(Steps).where(Steps.step == step).values(settings=settings))
    return len(found)


def _with_passwords(connection: Connection) -> Iterator[tuple[int, Any]]:
    """Steps, each with its settings as they should be."""
    for step, settings in connection.execute(select(Steps.step, Steps.settings)):
        clean = _clean(settings)
        if clean != settings:
            yield step, clean


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {name: _clean(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_clean(each) for each in value]
    return value
