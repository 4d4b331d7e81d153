"""Checks the files of an SQLite store before each transaction: they may be moved, restored or truncated while in use.

Guarantees: a database file is created at most once, readable by its owner only; SQLite gives its `-wal` and `-shm` the
same mode. A connection to a file that was moved or deleted is discarded, so that no write is lost; the next connection
opens the file that is there now, or fails. A truncated `-shm` file is extended to its old length with zeros, from which
SQLite rebuilds its index. SQLite maps this file into memory, and access beyond its end would kill the process with
SIGBUS. The repair happens between transactions; a file that is truncated during one still kills the process.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DisconnectionError

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
