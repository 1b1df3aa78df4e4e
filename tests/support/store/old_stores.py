"""Rows and stores as earlier revisions wrote them."""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from pathlib import Path

import zstandard
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

import tracegrad.store
from tracegrad.events import Turn

_COMPRESS = zstandard.ZstdCompressor(level=3).compress


def old_row(turn: Turn, known: int) -> dict[str, object]:
    context = turn.prompt_token_ids + turn.completion_token_ids
    return {
        "turn_id": turn.turn_id,
        "rollout_id": turn.rollout_id,
        "parent_id": turn.parent_id,
        "dialect": turn.dialect,
        "model": turn.model,
        "prompt_tokens": len(turn.prompt_token_ids),
        "completion_tokens": len(turn.completion_token_ids),
        "context_digest": hashlib.blake2b(_bytes(context), digest_size=16).digest(),
        "delta": _COMPRESS(_bytes(turn.prompt_token_ids[known:])),
        "completion": _COMPRESS(_bytes(turn.completion_token_ids)),
        "logprobs": _COMPRESS(_bytes(turn.completion_logprobs)),
        "policy_versions": json.dumps(turn.policy_versions),
        "last_version": 0,
        "sampling": json.dumps(turn.sampling),
        "request": _COMPRESS(json.dumps(turn.request).encode()),
        "response": _COMPRESS(json.dumps(turn.response).encode()),
        "created_at": turn.created_at,
    }


def _bytes(values: array[int] | array[float]) -> bytes:
    return struct.pack(f"<{len(values)}{values.typecode}", *values)


def insert_row(connection: Connection, table: str, row: dict[str, object]) -> None:
    names = ", ".join(row)
    marks = ", ".join(f":{name}" for name in row)
    connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({marks})"), row)


def upgraded(connection: Connection, revision: str) -> None:
    config = Config()
    folder = Path(tracegrad.store.__file__).parent / "migrations"
    config.set_main_option("script_location", str(folder))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
