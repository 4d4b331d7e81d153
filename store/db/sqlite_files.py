"""The files of an SQLite store, looked at before each transaction: a store can be moved, restored or spoilt in use.

Promises: a database file is made once, where it may be at all, and never later; a connection to a file that was moved
or deleted is used no more, so that nothing is written where nobody will find it: the next one goes to what stands in
its place, or says that there is nothing. A `-shm` file that was cut short gets its length again, in zeros, from which
SQLite makes its index anew: it maps that file into memory, and whoever touched the map would end by SIGBUS. This is
mended between two transactions; within one, nothing can help.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DisconnectionError

_INODE = "ratchet_inode"


def watch_files(engine: sa.Engine, file: Path, create: bool) -> None:
    """Look after the files of an engine's database; `create` says whether the first connection may make them."""
    files = _Files(file, create)
    sa.event.listen(engine, "do_connect", files.before_connection)
    sa.event.listen(engine, "connect", files.connected)
    sa.event.listen(engine, "checkout", files.before_use)


class _Files:
    """One engine's database file and the map beside it."""

    def __init__(self, file: Path, create: bool) -> None:
        self._file = file
        self._shared = f"{file}-shm"
        self._may_create = create
        self._mapped = (0, 0)  # inode and greatest length that the map was seen with

    def before_connection(self, *_: Any) -> None:
        """Make the folder, or refuse to connect to nothing."""
        if self._may_create:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._may_create = False
        elif not self._file.exists():
            raise sqlite3.OperationalError(f"there is no store at {self._file}")
        self._mend_map()

    def connected(self, _: Any, record: Any) -> None:
        """Remember which file a connection has open."""
        record.info[_INODE] = self._inode()

    def before_use(self, _: Any, record: Any, __: Any) -> None:
        """Give a connection up whose file is no longer the store's. Raises DisconnectionError."""
        self._mend_map()
        if record.info.get(_INODE) != self._inode():
            raise DisconnectionError(f"{self._file} is another file than before")

    def _inode(self) -> int | None:
        try:
            return os.stat(self._file).st_ino
        except OSError:
            return None

    def _mend_map(self) -> None:
        """Give a map that was cut short its length again. Raises sqlite3.OperationalError where that fails."""
        try:
            found = os.stat(self._shared)
        except OSError:
            return
        inode, length = self._mapped
        if inode == found.st_ino and found.st_size < length:
            self._lengthen(length)
        else:
            self._mapped = (found.st_ino, found.st_size)

    def _lengthen(self, length: int) -> None:
        try:
            file = os.open(self._shared, os.O_RDWR)
            try:
                os.posix_fallocate(file, 0, length)  # with its blocks: a hole on a full disk would be SIGBUS again
            finally:
                os.close(file)
        except OSError as error:
            raise sqlite3.OperationalError(f"{self._shared} was cut short and cannot be mended: {error}") from error
