"""What only a server can do to a store: refuse us, go away, come back, take turns with others."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

import psycopg
import pytest
from sqlalchemy import Connection, exc, insert, select

from support.store import postgres_server as postgres
from support.store.events import make_turn
from support.store.query_plans import uses_index
from tracegrad.events import RolloutStarted
from tracegrad.store import (
    GroupCommitWriter,
    Ledger,
    Store,
    StoreLost,
    StoreMissing,
    StoreUnavailable,
)
from tracegrad.store.databases import Conflict, database_at
from tracegrad.store.expressions import begins_with
from tracegrad.store.models import Rollouts

SECRET = "s3cret-word"


@pytest.fixture
def own_server() -> Iterator[postgres.Server]:
    """For tests that end it."""
    with postgres.running() as server:
        yield server


@pytest.fixture
def own_database(request: pytest.FixtureRequest, postgres_server: postgres.Server) -> Iterator[str]:
    """The URL of one that the test may change; made with the options of its parameter."""
    url = postgres_server.new_database(getattr(request, "param", ""))
    yield url
    postgres_server.drop(url)


# URLs


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_urls_as_hosting_services_give_them(postgres_url: str, scheme: str) -> None:
    with Store.open(postgres_url.replace("postgresql", scheme, 1)) as store:
        store.append([make_turn("t")])
        assert store.find_turn("t") is not None


@pytest.mark.parametrize(
    ("url", "match"),
    [
        (f"postgres://u:{SECRET}@h", "needs a database: postgresql://USER@HOST/NAME"),
        (f"postgres://u:{SECRET}@h:port/db", r"postgres://u:\*\*\*@h:port/db' is no URL"),
        (f"postgresql+asyncpg://u:{SECRET}@h/db", "'postgresql\\+asyncpg' is not a database"),
        (f"postgres://u:{SECRET}@h/db?pgbouncer=true", 'connection option "pgbouncer"; leave it'),
    ],
)
def test_a_useless_url_is_one_line_without_its_password(url: str, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        Store.open(url)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def refused(url: str, *, create: bool = True) -> str:
    with pytest.raises(StoreUnavailable) as caught:
        Store.open(url, create=create)
    message = str(caught.value)
    assert SECRET not in message
    assert "\n" not in message
    return message


def test_a_database_that_is_not_there_is_named_with_its_fix(
    postgres_server: postgres.Server,
) -> None:
    message = refused(postgres_server.url("nobody's") + f"&password={SECRET}")
    assert message.startswith("store postgresql://tests@/nobody%27s?host=")
    assert 'database "nobody\'s" does not exist' in message
    assert message.endswith(f"make it: createdb -h {postgres_server.folder} 'nobody'\"'\"'s'")


def test_a_role_that_is_not_there_is_named_with_its_fix(postgres_url: str) -> None:
    message = refused(postgres_url.replace("//tests@", f"//stranger:{SECRET}@"))
    assert 'role "stranger" does not exist; make it (createuser stranger), or name' in message
    assert "stranger:***@" in message


def test_a_host_that_is_not_there_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        message = refused(f"postgres://u:{SECRET}@127.0.0.1:{port}/db")
    assert f"port {port} failed: Connection refused" in message
    message = refused(f"postgres://u:{SECRET}@no.such.host.invalid/db")
    assert message.endswith("look at the host in the URL")


def test_a_role_that_may_not_make_tables_gets_the_fix(
    postgres_server: postgres.Server, own_database: str
) -> None:
    name = postgres.database_of(own_database)
    guests = own_database.replace("//tests@", f"//guest_{name}@")
    postgres_server.say(f"CREATE ROLE guest_{name} LOGIN")
    message = refused(guests)
    assert "permission denied for schema public" in message
    assert message.endswith(f'ALTER DATABASE "{name}" OWNER TO "guest_{name}"')
    postgres_server.say(f"ALTER DATABASE {name} OWNER TO guest_{name}")
    Store.open(guests).close()


@pytest.mark.parametrize(
    "own_database", ["ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0"], indirect=True
)
def test_a_database_that_cannot_hold_any_text_is_refused(own_database: str) -> None:
    message = refused(own_database)
    assert "encoding is LATIN1; make one that holds any text: createdb -E UTF8" in message


def test_a_database_without_tables_of_ours_is_no_store(empty_postgres_url: str) -> None:
    with pytest.raises(StoreMissing, match="no store at postgresql://tests@/"):
        Store.open(empty_postgres_url, create=False)
    Store.open(empty_postgres_url).close()
    Store.open(empty_postgres_url, create=False).close()


def test_a_schema_of_its_own_can_be_named_in_the_url(
    postgres_server: postgres.Server, empty_postgres_url: str
) -> None:
    with postgres_server.connect(postgres.database_of(empty_postgres_url)) as connection:
        connection.execute("CREATE SCHEMA mine")
        connection.execute("CREATE TABLE public.turns (of_somebody_else int)")
        with Store.open(f"{empty_postgres_url}&options=-csearch_path%3Dmine") as store:
            store.append([make_turn("t")])
        assert connection.execute("SELECT count(*) FROM mine.turns").fetchone() == (1,)


@pytest.mark.parametrize(
    "own_database",
    ["TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'de-DE' LOCALE 'C.UTF-8'"],
    indirect=True,
)
def test_ids_are_found_by_their_beginning_whatever_the_databases_language(
    own_database: str,
) -> None:
    with Store.open(own_database) as store:
        store.append([RolloutStarted(rollout_id=name) for name in ("Ab", "ab", "äb", "b")])
        assert [row.rollout_id for row in store.rollouts()] != []
        assert store.rollout("A").summary.rollout_id == "Ab"
        query = select(Rollouts.rollout_id).where(begins_with(Rollouts.rollout_id, "a"))
        assert uses_index(store, query)


# A server that goes away

Transaction = Callable[[], AbstractContextManager[Connection]]


def test_a_server_that_is_restarted_costs_errors_and_nothing_else(
    own_server: postgres.Server,
) -> None:
    url = own_server.new_database()
    with Store.open(url) as store, GroupCommitWriter(store) as writer:
        writer.submit([make_turn("before")]).result(timeout=30)
        postgres.stop(own_server)
        for _ in range(2):
            with pytest.raises(StoreUnavailable) as caught:
                writer.submit([make_turn("lost")]).result(timeout=30)
            assert "\n" not in str(caught.value)
            assert str(own_server.folder) in str(caught.value)
        with pytest.raises(StoreUnavailable):
            store.rollouts()
        with pytest.raises(StoreUnavailable):
            Ledger(store).lease(groups=1, group_size=1, owner="me", ttl_s=1)
        again = postgres.start(own_server.folder)
        try:
            writer.submit([make_turn("after")]).result(timeout=30)
            assert [turn.turn_id for turn in store.rollout_turns("r")] == ["before", "after"]
            assert Ledger(store).lease(groups=1, group_size=1, owner="me", ttl_s=1) == []
        finally:
            store.close()
            postgres.stop(again)


TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


def test_a_connection_that_is_cut_inside_a_transaction_stores_nothing(
    postgres_server: postgres.Server, postgres_url: str
) -> None:
    with (
        Store.open(postgres_url) as store,
        postgres_server.connect(postgres.database_of(postgres_url)) as operator,
    ):

        def cut(transaction: Transaction, *, before_the_commit: bool) -> None:
            with transaction() as connection:
                connection.execute(insert(Rollouts), row)
                operator.execute(TERMINATE)
                if not before_the_commit:
                    connection.execute(select(Rollouts))

        row = {"rollout_id": "half", "opened": False, "opened_at": 1.0}
        for transaction in (store.appending, store.exclusive, store.reading):
            for before_the_commit in (True, False):
                with pytest.raises(StoreUnavailable) as caught:
                    cut(transaction, before_the_commit=before_the_commit)
                assert "\n" not in str(caught.value)
        store.append([make_turn("t")])
        assert [row.rollout_id for row in store.rollouts()] == ["r"]


def test_a_server_that_only_reads_is_one_line(
    postgres_server: postgres.Server, own_database: str
) -> None:
    Store.open(own_database).close()
    name = postgres.database_of(own_database)
    postgres_server.say(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with Store.open(own_database) as store:
        assert store.rollouts() == []
        with pytest.raises(StoreUnavailable, match="read-only transaction; connect to the pri"):
            store.append([make_turn("t")])


def test_connections_to_a_standby_are_given_up(
    postgres_server: postgres.Server, own_database: str
) -> None:
    Store.open(own_database).close()
    name = postgres.database_of(own_database)
    postgres_server.say(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with Store.open(own_database) as store, GroupCommitWriter(store, reconnect_s=15) as writer:
        with store.reading(), store.reading():  # the pool has two of them
            pass
        # What connects from now on reaches a server that writes.
        postgres_server.say(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        writer.submit([make_turn("t")]).result(timeout=30)
        assert store.find_turn("t") is not None


def test_a_server_without_free_connections_is_one_line(
    postgres_server: postgres.Server, own_database: str
) -> None:
    Store.open(own_database).close()
    name = postgres.database_of(own_database)
    with postgres_server.connect(name) as connection:
        connection.execute(f"CREATE ROLE one_{name} LOGIN CONNECTION LIMIT 1")
        connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO one_{name}")
    with (
        Store.open(own_database.replace("//tests@", f"//one_{name}@")) as store,
        store.reading(),
        pytest.raises(StoreUnavailable, match="too many connections for role"),
    ):
        store.rollouts()


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("40P01", Conflict),
        ("40001", Conflict),
        ("53100", StoreUnavailable),  # disk full
        ("55P03", StoreUnavailable),  # lock timeout
        ("57P01", StoreLost),  # the server is ended
        ("57P03", StoreLost),  # it starts
        ("08006", StoreLost),  # the connection broke
        ("25006", StoreLost),  # it is a standby
        ("25P03", StoreUnavailable),  # too long idle in a transaction
        ("58030", StoreUnavailable),  # the disk fails
        ("XX001", StoreUnavailable),  # damaged data
        ("42501", StoreUnavailable),  # missing rights
        ("23503", None),
        ("42601", None),
        ("22P02", None),
        ("25P02", None),
        ("54000", None),
    ],
)
def test_a_mistake_of_ours_does_not_look_like_a_server_that_is_away(
    state: str, kind: type[StoreUnavailable] | None
) -> None:
    original = psycopg.errors.lookup(state)("what\nit says")
    error = exc.DBAPIError.instance("SELECT 1", {}, original, psycopg.Error)
    assert isinstance(error, exc.DBAPIError)
    made = database_at(f"postgres://u:{SECRET}@h/db").translate_error(error)
    assert (made and type(made)) == kind
    assert made is None or str(made) == "store postgresql://u:***@h/db: what it says"


def test_a_missing_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ValueError, match=r"pip install 'tracegrad\[postgres\]'"):
        Store.open("postgresql://u@h/db")


def test_a_process_holds_16_connections_at_most(postgres_url: str) -> None:
    with Store.open(postgres_url, busy_timeout_s=0.1) as store, ExitStack() as held:
        for _ in range(16):
            held.enter_context(store.reading())
        with pytest.raises(StoreUnavailable, match="no free connection"):
            store.rollouts()
        held.close()
        assert store.rollouts() == []


def test_no_password_is_in_a_stores_name() -> None:
    named = database_at(f"postgres://u:{SECRET}@h:5/db?password={SECRET}&host=/run&sslmode=require")
    assert named.describe() == "postgresql://u:***@h:5/db?host=%2Frun"


def test_the_environments_encoding_does_not_matter(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    with Store.open(postgres_url) as store:
        store.append([RolloutStarted(rollout_id="€")])
        assert store.rollout("€").summary.rollout_id == "€"
