"""The database: SQLite's files, connections, transactions, and the creation of the schema."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError, DataError, DBAPIError, DisconnectionError, OperationalError

from ratchet.store.errors import (
    RecordNotFound,
    SchemaMismatch,
    StoreDamaged,
    StoreError,
    StoreNotFound,
    StoreUnavailable,
    install_hint,
)

# Checks the files of an SQLite store before each transaction: they may be moved, restored or truncated while in use.
#
# Guarantees: a database file is created at most once, readable by its owner only; SQLite gives its `-wal` and `-shm`
# the same mode. A connection to a file that was moved or deleted is discarded, so that no write is lost; the next
# connection opens the file that is there now, or fails. A truncated `-shm` file is extended to its old length with
# zeros, from which SQLite rebuilds its index. SQLite maps this file into memory, and access beyond its end would kill
# the process with SIGBUS. The repair happens between transactions; a file that is truncated during one still kills the
# process.

_INODE = "ratchet_inode"


def watch_files(engine: sa.Engine, file: Path, create: bool) -> None:
    """Check the files of an engine's database; `create`: the first connection may create them."""
    files = _Files(file, create)
    sa.event.listen(engine, "do_connect", files.before_connection)
    sa.event.listen(engine, "connect", files.connected)
    sa.event.listen(engine, "checkout", files.before_use)


class _Files:
    """An engine's database file and its shared-memory file."""

    def __init__(self, file: Path, create: bool) -> None:
        self._file = file
        self._shm = f"{file}-shm"
        self._may_create = create
        self._shm_seen = (0, 0)  # inode and greatest length seen

    def before_connection(self, *_: Any) -> None:
        """Create the folder, or raise if the file is missing."""
        if self._may_create:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(OSError):  # SQLite's own error names the reason
                self._file.touch(mode=0o600)
            self._may_create = False
        elif not self._file.exists():
            raise sqlite3.OperationalError(f"there is no store at {self._file}")
        self._repair_shm()

    def connected(self, _: Any, record: Any) -> None:
        """Record which file a connection has open."""
        record.info[_INODE] = self._inode()

    def before_use(self, _: Any, record: Any, __: Any) -> None:
        """Raise DisconnectionError if the connection's file is no longer the store's."""
        self._repair_shm()
        if record.info.get(_INODE) != self._inode():
            raise DisconnectionError(f"{self._file} is another file than before")

    def _inode(self) -> int | None:
        try:
            return os.stat(self._file).st_ino
        except OSError:
            return None

    def _repair_shm(self) -> None:
        """Extend a truncated `-shm` file to its old length. Raises sqlite3.OperationalError if that fails."""
        try:
            found = os.stat(self._shm)
        except OSError:
            return
        inode, length = self._shm_seen
        if inode == found.st_ino and found.st_size < length:
            self._lengthen(length)
        else:
            self._shm_seen = (found.st_ino, found.st_size)

    def _lengthen(self, length: int) -> None:
        try:
            file = os.open(self._shm, os.O_RDWR)
            try:
                os.posix_fallocate(file, 0, length)  # allocate blocks: a hole on a full disk would cause SIGBUS again
            finally:
                os.close(file)
        except OSError as error:
            raise sqlite3.OperationalError(f"{self._shm} was truncated and cannot be repaired: {error}") from error


# Opens the database and creates its schema: SQLite (WAL) by default, PostgreSQL by URL.
#
# Guarantees: the schema of an empty database is created in one transaction. A database of another version of Ratchet is
# refused with the remedy, never migrated implicitly. A write transaction locks at its start, so that SQLite cannot fail
# in the middle of it. Errors do not quote the values of their statements, because they are logged.

HEAD = "0002_refused_calls"  # the schema's version: another one with every change of the tables, which a test demands
_WAL_SECONDS = 15.0
# PostgreSQL's errors that are no OperationalError and yet about the server's state, not about a statement's values:
# read-only (a standby), a statement that a connection pooler's other server has not prepared, or has, privileges, a
# missing schema or table.
_SERVER_STATES = ("25006", "26000", "42P05", "42501", "3F000", "42P01")
_DAMAGED = ("XX001", "XX002")
_REMEDY_OF_DAMAGE = (
    "put a backup in its place, or what `sqlite3 FILE .recover` or pg_dump can read; what the proxies have recorded "
    "since waits in their journals. `ratchet store verify` names what is damaged"
)
_FREE_SPACE = "free space on the store's disk"
_REFUSALS = {
    "25006": "it is a standby, or set to read-only: name the primary server (--store, RATCHET_STORE)",
    "42501": "grant the rights to the user that --store or RATCHET_STORE names",
    "53100": _FREE_SPACE,
    "57014": "raise the server's statement_timeout, or find out what slows it",
}
# libpq's; a URL may set others. Without them, a server that hangs, or whose machine is gone, is waited for 2 minutes at
# the connection and up to 2 hours at an answer. Its kernel answers keep-alives, also during a long statement.
_CONNECTION_LIMITS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30000,
}
_CREATION_LOCK = 0x52415443  # advisory lock: one process at a time creates the schema

for _kind in (bytes, type(None)):  # without an adapter, Python 3.11 looks for one at every value, in twice the time
    sqlite3.register_adapter(_kind, lambda value: value)


def _url(text: str) -> sa.URL:
    """Parse a store URL; a bare path means SQLite."""
    if "://" not in text:
        text = f"sqlite:///{text}"
    try:
        url = sa.make_url(text)
    except sa.exc.ArgumentError as error:
        # The text may contain a password: show only its start.
        raise StoreError(f"--store {text[:12]!r}... is not a database URL; use a path or postgresql://...") from error
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError(f"--store {url.drivername} is not supported; use sqlite:///PATH or postgresql://...")
    return url


def connect(store_url: str, create: bool = True, *, writes_much: bool = False) -> sa.Engine:
    """Return an engine for `store_url` without checking the schema.

    `writes_much`: use larger SQLite caches, because writes to a large store change pages all over the file. With
    `create`, the first connection creates the folder and file of an SQLite store; later ones never do, so that a store
    that was moved away temporarily is not replaced by an empty one.
    """
    engine = _create_engine(store_url, create, writes_much)
    kind = type(engine.pool)
    logging.getLogger(f"{kind.__module__}.{kind.__name__}").addFilter(_is_no_interrupt)
    logging.getLogger("psycopg").addFilter(_is_no_consequence)
    return engine


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    """Whether a log record is about anything but Ctrl-C, which SQLAlchemy logs if a connection is being closed."""
    return record.exc_info is None or not isinstance(record.exc_info[1], KeyboardInterrupt)


def _is_no_consequence(record: logging.LogRecord) -> bool:
    """Whether a log record of psycopg is about anything but what failed because of an error that it raises itself."""
    return not str(record.msg).startswith("error ignored ")


def _create_engine(store_url: str, create: bool, writes_much: bool) -> sa.Engine:
    url = _url(store_url)
    if url.get_backend_name() == "sqlite":
        engine = sa.create_engine(
            url,
            connect_args={"timeout": 15, "check_same_thread": False},
            json_serializer=_dump,
            json_deserializer=_load,
            hide_parameters=True,
        )
        if url.database and url.database != ":memory:":
            watch_files(engine, Path(url.database), create)
        sa.event.listen(engine, "connect", _prepare_sqlite)
        if writes_much:
            sa.event.listen(engine, "connect", _enlarge_caches)
        return engine
    try:
        engine = sa.create_engine(
            url,
            connect_args={name: value for name, value in _CONNECTION_LIMITS.items() if name not in url.query},
            pool_pre_ping=True,
            paramstyle="format",  # by place, as SQLite's
            json_serializer=_dump,
            json_deserializer=_load,
            hide_parameters=True,
        )
    except ModuleNotFoundError as error:
        raise StoreError(f"PostgreSQL needs its driver: {install_hint('postgres')}") from error
    sa.event.listen(engine, "handle_error", _omit_detail)
    return engine


def _omit_detail(context: Any) -> None:
    """Leave out the second line of PostgreSQL's message, which quotes the row."""
    original, error = context.original_exception, context.sqlalchemy_exception
    message = original.diag.message_primary if hasattr(original, "diag") else None
    if message and error is not None:
        original.args, error.args = (message,), (f"{type(original).__name__}: {message}",)


def missing_file(engine: sa.Engine) -> Path | None:
    """Return the path of an SQLite store whose file is missing; None if it exists, or for PostgreSQL."""
    name = engine.url.database
    if engine.dialect.name != "sqlite" or not name or name == ":memory:" or Path(name).exists():
        return None
    return Path(name).absolute()


def _dump(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _load(text: str | bytes) -> Any:
    return msgspec.json.decode(text)


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # `write` starts transactions, not the driver
    cursor = connection.cursor()
    # FULL: a commit is durable when it returns, because the proxy deletes its journal afterwards.
    for pragma in ("busy_timeout=15000", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    _use_wal(cursor)
    cursor.close()


def _enlarge_caches(connection: Any, _: Any) -> None:
    """Cache 8 MB of pages, not 2, and checkpoint at 16 MB, not 4, so that pages that change again are written once."""
    connection.execute("PRAGMA cache_size=-8000")
    connection.execute("PRAGMA wal_autocheckpoint=4000")


def _use_wal(cursor: Any) -> None:
    """Switch to WAL; SQLite itself does not wait while another connection does the same."""
    until = time.monotonic() + _WAL_SECONDS
    while cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


@contextmanager
def write(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Open a write transaction; commit at the end, roll back on any error.

    Raises StoreUnavailable when the database is down or stays locked.
    """
    try:
        with engine.connect() as connection:
            if engine.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection
            connection.commit()
    except DatabaseError as error:
        _raise_unavailable(error, engine)
        raise


@contextmanager
def read(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Open a read transaction; in SQLite, on a snapshot. Raises StoreUnavailable when the database is down.

    Raises RecordNotFound for a value that no column can hold (a number too large, a NUL in a text).
    """
    try:
        with engine.connect() as connection:
            if engine.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN")
            yield connection
    except (DataError, OverflowError) as error:
        raise RecordNotFound("no record can have such a value") from error
    except DatabaseError as error:
        _raise_unavailable(error, engine)
        raise


def call_on_damage(engine: sa.Engine, function: Callable[[StoreDamaged], None]) -> None:
    """Call a function, after the transaction, whenever the database says that it is damaged."""
    engine.update_execution_options(on_damage=function)


def _raise_unavailable(error: DatabaseError, engine: sa.Engine) -> None:
    """Raise StoreUnavailable if the database is unreachable, read-only or damaged."""
    unavailable = _unavailable(error, engine)
    if isinstance(unavailable, StoreDamaged) and (function := engine.get_execution_options().get("on_damage")):
        function(unavailable)
    if unavailable is not None:
        raise unavailable from error


def _unavailable(error: DatabaseError, engine: sa.Engine) -> StoreUnavailable | None:
    """Return the error if the database is unreachable, read-only or damaged; None if a statement was wrong."""
    state = getattr(error.orig, "sqlstate", None)
    if type(error.orig) is sqlite3.DatabaseError:  # its subclasses are about statements, not about the file
        return StoreDamaged(
            f"the store's file {engine.url.database} is damaged, or was never a store ({error.orig}): is the path "
            f"right? If so, {_REMEDY_OF_DAMAGE}"
        )
    if state in _DAMAGED:
        text = " ".join(str(error.orig).split())
        return StoreDamaged(f"the store {engine.url.render_as_string()} is damaged ({text}): {_REMEDY_OF_DAMAGE}")
    if not isinstance(error, OperationalError) and state not in _SERVER_STATES:
        return None
    text = " ".join(str(error.orig).split())
    if (remedy := _remedy_of_refusal(error)) is not None:
        return StoreUnavailable(f"the store refused a statement: {text}{remedy}")
    return StoreUnavailable(f"the store did not answer: {text}{_remedy(error, engine)}")


def _remedy_of_refusal(error: DatabaseError) -> str | None:
    """Return the remedy, which may be empty, if the database answered with a refusal; else None."""
    if getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return f"; {_FREE_SPACE}"
    state = getattr(error.orig, "sqlstate", None)
    if state in _REFUSALS:
        return f"; {_REFUSALS[state]}"
    return "" if state in _SERVER_STATES else None


def _remedy(error: DatabaseError, engine: sa.Engine) -> str:
    """Return the remedy if no connection could be made; an empty text if an open one broke."""
    if engine.dialect.name == "sqlite":
        opened = "unable to open database file" not in str(error.orig)
        return "" if opened else f": {engine.url.database}; name a --store in a folder that this user may write"
    if "connection" not in str(error.orig):
        return ""
    return (
        f"; is PostgreSQL running there, and are host, port, user, password and database of "
        f"{engine.url.render_as_string()} right "
        "(--store, RATCHET_STORE)?"
    )


def check_url(text: str) -> None:
    """Check a store's URL without connecting to it. Raises StoreError; StoreNotFound if its folder is missing."""
    url = _url(text)
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return
    folder = Path(url.database).absolute().parent
    if not folder.is_dir():
        raise StoreNotFound(
            f"--store {url.database}: there is no folder {folder}; make it (mkdir -p {folder}) or name another store"
        )


def schema_version(engine: sa.Engine) -> str | None:
    """Return the version of the database's schema; None for an empty database."""
    with read(engine) as connection:
        return _read_version(connection)


def _read_version(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):  # Alembic's own table: it begins with the first release
        return None
    version: str | None = connection.scalar(sa.text("SELECT version_num FROM alembic_version"))
    return version


def ensure_schema(engine: sa.Engine) -> None:
    """Create the schema in an empty database, in one transaction. Several processes may call it at once.

    Raises SchemaMismatch if the database has another schema, StoreUnavailable.
    """
    version = schema_version(engine)
    if version is None:
        version = _create_schema(engine)
    if version != HEAD:
        raise SchemaMismatch(
            f"the store {engine.url.render_as_string()} has schema {version}, this version of Ratchet needs {HEAD}: "
            "use the version of Ratchet that created it, or name a new store (--store, RATCHET_STORE); schemas from "
            "before the first release are not migrated"
        )


def _create_schema(engine: sa.Engine) -> str:
    """Create every table, unless another process has by now; return the schema's version."""
    from ratchet.store.db.schema import metadata

    try:
        with engine.connect() as connection:
            if engine.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_CREATION_LOCK})")
            if (version := _read_version(connection)) is not None:
                return version
            metadata.create_all(connection)
            connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
            connection.execute(sa.text("INSERT INTO alembic_version VALUES (:version)"), {"version": HEAD})
            connection.commit()
    except DBAPIError as error:
        raise StoreUnavailable(
            f"the tables of the store {engine.url.render_as_string()} could not be created: {error.orig}; check that "
            "its disk has space and that this user may write to it"
        ) from error
    return HEAD
