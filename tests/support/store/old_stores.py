"""Stores and rows as earlier versions wrote them.

`revision_0009` holds dumps of a store that the code of commit 3fb5415 filled, in each database, and
that code's export of it: conversations with shared texts, a fork, rewards, spans, a step, leases, a
skipped and a refused turn, a rollout that begins behind another's turns.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import zstandard
from sqlalchemy import Connection, make_url, text

from tracegrad.events import Turn

_FOLDER = Path(__file__).parent / "revision_0009"
_COMPRESS = zstandard.ZstdCompressor(level=3).compress


def write_store_of_revision_0009(url: str) -> None:
    name = make_url(url).get_backend_name()
    statements = (_FOLDER / f"{name}.sql").read_text()
    if name == "sqlite":
        with closing(sqlite3.connect(str(make_url(url).database))) as file:
            file.executescript(statements)
    else:
        with psycopg.connect(url) as connection:
            connection.execute(statements.encode())


def export_of_revision_0009(url: str) -> list[dict[str, Any]]:
    lines = (_FOLDER / f"{make_url(url).get_backend_name()}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def first_revision_row(turn: Turn, known: int) -> dict[str, object]:
    """As revision 0001 packed it; migrations left the packed columns as they were."""
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
