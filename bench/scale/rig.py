"""The processes that a day is pushed through, and what they have used so far."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import psutil
import psycopg

from bench.pages import our_path
from bench.proxy.servers import Server, python
from bench.scale.board import Board, Cell
from tracegrad_trainer.utils.network import find_free_port

Bytes = Callable[[], int]
Seconds = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Database:
    """Of the store. `size`: bytes that it takes now, without room that is free in its files;
    `cpu_s`: what its server has used, nothing
    where it has none."""

    name: str
    url: str
    size: Bytes
    cpu_s: Seconds


@dataclass(frozen=True, slots=True)
class Used:
    """Since the start of the processes; the difference of two is what was used between. The
    writer's seconds are those of its transactions, its waiting for the disk (or the database's
    server) included; its waiting for a core is `writer_delay_s`."""

    proxy_cpu_s: float
    writer_s: float
    writer_cpu_s: float
    writer_delay_s: float
    commits: float
    events: float
    turns: float
    database_cpu_s: float
    store_bytes: float
    engine_bytes: float

    def since(self, earlier: Used) -> Used:
        return Used(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(Used)))


@dataclass(frozen=True, slots=True)
class Rig:
    """`proxy` and `engine` run; the board is theirs and the simulation's."""

    board: Board
    proxy: Server
    engine: Server
    database: Database

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.proxy.port}"

    def used(self) -> Used:
        board = self.board
        return Used(
            proxy_cpu_s=self.proxy.usage().cpu_s,
            writer_s=board[Cell.WRITER_S],
            writer_cpu_s=board[Cell.WRITER_CPU_S],
            writer_delay_s=board[Cell.WRITER_DELAY_S],
            commits=board[Cell.COMMITS],
            events=board[Cell.EVENTS],
            turns=board[Cell.TURNS],
            database_cpu_s=self.database.cpu_s(),
            store_bytes=self.database.size(),
            engine_bytes=board[Cell.ENGINE_BYTES_IN] + board[Cell.ENGINE_BYTES_OUT],
        )

    def memory(self) -> int:
        """Resident bytes of the proxy."""
        return self.proxy.usage().rss


@contextmanager
def rig(folder: Path, database: Database, tokenizer: Path, *, now: float) -> Iterator[Rig]:
    """Started, with the virtual clock at `now`. Raises `bench.proxy.servers.DidNotStart`."""
    board = Board.create(folder / f"board-{database.name}")
    board[Cell.NOW] = now
    with (
        _process(f"engine-{database.name}", folder, board, tokenizer) as engine,
        _process(
            f"proxy-{database.name}",
            folder,
            board,
            tokenizer,
            *("--upstream", f"http://127.0.0.1:{engine.port}", "--store", database.url),
        ) as proxy,
    ):
        engine.wait()
        proxy.wait()
        yield Rig(board, proxy, engine, database)


def _process(name: str, folder: Path, board: Board, tokenizer: Path, *more: str) -> Server:
    port = find_free_port()
    module = f"bench.scale.{name.partition('-')[0]}"
    command = python(
        module, str(board.path), "--port", str(port), "--tokenizer", str(tokenizer), *more
    )
    return Server(name, command, port=port, folder=folder, environment=our_path())


def sqlite_file(path: Path) -> Database:
    def size() -> int:
        # Its pages, those that are only in the log so far included: the files grow in steps.
        with closing(sqlite3.connect(path, timeout=30)) as connection:
            pages, unused, size = (
                connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
        return int((pages - unused) * size)

    return Database("SQLite", f"sqlite:///{path}", size, lambda: 0.0)


def postgresql_server(url: str, pid: int) -> Database:
    """`pid`: of the server's first process."""
    server = psutil.Process(pid)

    def size() -> int:
        with psycopg.connect(url) as connection:
            row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
            assert row is not None
            return int(row[0])

    return Database("PostgreSQL", url, size, lambda: _family_cpu_s(server))


def _family_cpu_s(process: psutil.Process) -> float:
    """Of the process and its children, those that have ended included."""
    own = process.cpu_times()
    total: float = own.user + own.system + own.children_user + own.children_system
    for child in process.children():
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:  # it is the parent's from now on
            continue
        total += times.user + times.system
    return total
