"""The schema: created once, whole, and refused where it is another's."""

from __future__ import annotations

import hashlib
import itertools
import logging
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

import ratchet.store.db.engine as database
from ratchet import cli
from ratchet.store.db.schema import metadata
from ratchet.store.errors import SchemaMismatch, StoreDamaged, StoreError, StoreNotFound, StoreUnavailable
from ratchet.store.store import DAMAGE_ALARM, Store, open_store
from tests.harness.proxy.servers import overwrite_table
from tests.harness.records import answered_trajectory, call_start, ended

ROOT = Path(__file__).parents[2]


def test_an_interrupted_creation_leaves_no_table(empty_url: str) -> None:
    engine, tables = database.connect(empty_url), itertools.count()

    def fail_midway(*execution: Any) -> None:
        if "CREATE TABLE" in execution[2] and next(tables) == 10:
            raise RuntimeError

    sa.event.listen(engine, "before_cursor_execute", fail_midway)
    with pytest.raises(RuntimeError):
        database.ensure_schema(engine)
    sa.event.remove(engine, "before_cursor_execute", fail_midway)
    with engine.connect() as connection:
        assert sa.inspect(connection).get_table_names() == []
    database.ensure_schema(engine)
    engine.dispose()


def test_a_change_of_the_tables_has_another_schema_version() -> None:
    dialects: tuple[sa.Dialect, ...] = (sqlite.dialect(), postgresql.dialect())  # type: ignore[no-untyped-call]
    described = [
        (
            table.name,
            [(column.name, column.type.compile(dialect), column.nullable) for column in table.columns],
            sorted(_describe(one) for one in (*table.constraints, *table.indexes)),
        )
        for table in metadata.sorted_tables
        for dialect in dialects
    ]
    digest = hashlib.sha256(repr(described).encode()).hexdigest()[:16]
    assert {database.HEAD: digest} == {"0002_refused_calls": "8250293b1de2fc01"}, "name another HEAD, and pin it here"


def _describe(one: Any) -> str:
    rule = getattr(one, "sqltext", getattr(one, "unique", ""))
    return f"{one.name} {rule} {[column.name for column in one.columns]}"


def test_many_processes_may_open_an_empty_store_at_once(empty_url: str) -> None:
    failures: list[Exception] = []

    def use() -> None:
        try:
            open_store(empty_url).close()
        except StoreError as error:
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_store_of_an_unknown_schema_is_refused_with_the_remedy(store_url: str) -> None:
    open_store(store_url).close()
    engine = database.connect(store_url)
    with database.write(engine) as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0019'"))
    with pytest.raises(SchemaMismatch, match=r"has schema 0019, .* name a new store"):
        open_store(store_url)
    engine.dispose()


def test_a_store_that_is_only_read_is_never_made(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="there is no store at"):
        open_store(str(tmp_path / "typo" / "s.db"), create=False)
    assert not (tmp_path / "typo").exists()


def test_an_unreachable_database_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="did not answer"):
        open_store("postgresql://nobody@127.0.0.1:1/none")


@pytest.mark.parametrize("url", ["mysql://x/y", "://"])
def test_an_unknown_kind_of_store_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="postgresql"):
        open_store(url)


def test_an_error_inside_a_transaction_rolls_it_back(store_url: str) -> None:
    open_store(store_url).close()
    engine = database.connect(store_url)

    def fail_halfway() -> None:
        with database.write(engine) as connection:
            connection.execute(sa.insert(metadata.tables["leases"]).values(name="x", owner="y", expires_at=1.0))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    with database.read(engine) as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(metadata.tables["leases"])) == 0
    engine.dispose()


def test_a_store_that_was_moved_away_is_not_replaced_by_an_empty_one(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    engine = database.connect(str(folder / "store.db"))
    database.ensure_schema(engine)
    engine.dispose()
    folder.rename(tmp_path / "away")
    late = database.connect(str(folder / "store.db"), create=False)
    for one in (engine, late):
        with pytest.raises(StoreUnavailable, match="there is no store"), database.read(one):
            pass
    assert not folder.exists()
    (tmp_path / "away").rename(folder)
    assert database.schema_version(engine) == database.schema_version(late) == database.HEAD
    late.dispose()
    engine.dispose()


def test_a_file_that_is_deleted_in_use_is_written_no_more_and_a_backup_in_its_place_is_used(
    store_file: Path, tmp_path: Path
) -> None:
    backup = tmp_path / "backup.db"
    with open_store(str(store_file)) as store:
        store.policies.register_base("agent", "before")
        with sqlite3.connect(store_file) as here, closing(sqlite3.connect(backup)) as there:
            here.backup(there)
        here.close()
        for name in tmp_path.glob("store.db*"):
            name.unlink()
        for ask in (store.policies.all, partial(store.policies.register_base, "other", "lost")):
            with pytest.raises(StoreUnavailable, match="there is no store"):
                ask()
        backup.rename(store_file)
        store.policies.register_base("other", "after")
        assert {policy.alias for policy in store.policies.all()} == {"agent", "other"}


def test_a_shm_file_truncated_in_use_kills_no_process_and_is_rebuilt(store_file: Path) -> None:
    program = (  # in a process of its own: where it is not mended, SIGBUS ends it
        "import os, sys; from ratchet.store.store import open_store; store = open_store(sys.argv[1])\n"
        "for number in range(20):\n"
        "    store.policies.register_base(f'agent{number}', 'base')\n"
        "    os.truncate(sys.argv[1] + '-shm', 0 if number % 2 else 5000)\n"
        "    assert len(store.policies.all()) == number + 1\n"
        "store.close()"
    )
    run = subprocess.run([sys.executable, "-c", program, str(store_file)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    with open_store(str(store_file)) as store:
        assert len(store.policies.all()) == 20


def test_a_damaged_file_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    with open_store(str(file)) as store:
        store.policies.register_base("agent", "base")
    file.write_bytes(b"no database " * 1000)
    with pytest.raises(StoreUnavailable, match="damaged"):
        open_store(str(file))


def test_a_file_that_is_damaged_while_it_is_open_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    open_store(str(file)).close()
    with open_store(str(file)) as store:
        with file.open("r+b") as raw:
            raw.seek(100)
            raw.write(b"\xff" * (file.stat().st_size - 100))
        with pytest.raises(StoreUnavailable, match="damaged"):
            store.policies.all()


def test_damage_of_a_table_raises_an_alarm_that_verify_clears_once_it_is_repaired(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    with open_store(str(file)) as store:
        answered_trajectory(store, "first")
    whole = overwrite_table(file, "messages", b"\xa5")
    with open_store(str(file)) as store:
        for _ in range(3):
            with pytest.raises(StoreDamaged, match="damaged"):
                answered_trajectory(store, "second")
        (alarm,) = store.alarms.active()
    assert (alarm.name, alarm.count) == (DAMAGE_ALARM, 1)
    assert str(file) in alarm.reason
    assert "backup" in alarm.reason
    assert cli.run(["store", "verify", "--store", str(file)]) == 1
    overwrite_table(file, "messages", whole)
    with open_store(str(file)) as store:
        assert store.alarms.active() != []
        assert cli.run(["store", "verify", "--store", str(file)]) == 0
        assert store.alarms.active() == []


def run_sql(url: str, *statements: str) -> None:
    """Run statements without a transaction."""
    admin = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    admin.dispose()


REPLY = {"role": "assistant", "content": "Oslo"}
_STATES = {
    "refused.*read-only.*name the primary": "ALTER DATABASE {0} SET default_transaction_read_only = on",
    "refused.*denied.*grant the rights": "ALTER DATABASE {0} SET role = pg_monitor",
    "refused.*not exist": "ALTER TABLE messages RENAME TO aside",
}


@pytest.mark.parametrize("store_url", [pytest.param("postgresql", marks=pytest.mark.postgres)], indirect=True)
@pytest.mark.parametrize("state", _STATES)
def test_a_postgresql_that_takes_no_record_is_unavailable_and_refuses_none(store_url: str, state: str) -> None:
    with open_store(store_url) as store:
        name = sa.make_url(store_url).database
        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        run_sql(store_url, _STATES[state].format(name), f"SELECT pg_terminate_backend(pid) {others}")
        with pytest.raises(StoreUnavailable, match=state):
            store.calls.ship([ended(call_start("call_1", "traj_1"), REPLY)])


@pytest.mark.parametrize("store_url", [pytest.param("postgresql", marks=pytest.mark.postgres)], indirect=True)
def test_a_statement_that_is_cut_off_names_the_servers_limit(store_url: str) -> None:
    engine = database.connect(store_url)
    refusal = r"refused.*statement timeout; raise the server's statement_timeout"
    with pytest.raises(StoreUnavailable, match=refusal), database.write(engine) as connection:
        connection.exec_driver_sql("SET LOCAL statement_timeout = 50; SELECT pg_sleep(60)")
    engine.dispose()


def test_what_fails_because_of_an_error_that_is_raised_is_not_logged(
    store_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = database.connect(str(store_file))
    for line in ("error ignored terminating %r: %s", "%r has another warning: %s"):
        logging.getLogger("psycopg").warning(line, "<psycopg.Pipeline [BAD]>", "the connection is lost")
    engine.dispose()
    assert caplog.messages == ["'<psycopg.Pipeline [BAD]>' has another warning: the connection is lost"]


def test_a_full_disk_is_named_with_its_remedy(store_file: Path) -> None:
    engine = database.connect(str(store_file))
    sa.event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA max_page_count = 1"))
    refusal = r"refused.*disk is full; free space on the store's disk"
    with pytest.raises(StoreUnavailable, match=refusal), database.write(engine) as connection:
        connection.exec_driver_sql("CREATE TABLE more AS SELECT randomblob(1000000)")
    engine.dispose()


def test_an_error_does_not_quote_the_values_of_its_statement(store: Store) -> None:
    with pytest.raises(sa.exc.DBAPIError) as raised:
        store.calls.ship([ended(call_start("call_1", "traj_1"), REPLY, context="nonsense", error="a secret")])
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(("error", "is_logged"), [(KeyboardInterrupt, False), (RuntimeError, True)])
def test_ctrl_c_while_a_connection_is_closed_is_no_error_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: type[BaseException], is_logged: bool
) -> None:
    engine = database.connect(str(tmp_path / "store.db"))
    with engine.connect() as connection:
        raw = connection.connection.dbapi_connection
        assert raw is not None
        close = raw.close

    def interrupted(_: Any) -> None:
        close()
        raise error

    with mock.patch.object(engine.dialect, "do_close", interrupted), suppress(error):
        engine.dispose()
    assert bool(caplog.records) is is_logged
