"""An S3 server on this machine: moto's, with users and rights; and one that answers every request with one error."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import httpx

from tests.harness.ports import free_port

BUCKET = "adapters"
ADMIN = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


class S3Server:
    """A running server with an empty bucket. `environment` is what a client needs."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = ADMIN | {"AWS_ENDPOINT_URL": self.url, "AWS_EC2_METADATA_DISABLED": "true"}
        with (folder / "s3.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
                stdout=log, stderr=log, env=os.environ | {"INITIAL_NO_AUTH_ACTION_COUNT": "1000000"},
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"{self.url}/moto-api/", trust_env=False)
                break
            except httpx.HTTPError:
                assert self.process.poll() is None, (folder / "s3.log").read_text()
                assert time.monotonic() < deadline, "moto did not start"
                time.sleep(0.05)
        httpx.put(f"{self.url}/{BUCKET}", trust_env=False).raise_for_status()

    def put(self, path: str, content: bytes) -> None:
        """Overwrite an object."""
        self._client().pipe_file(f"{BUCKET}/{path}", content)

    def remove(self, path: str) -> None:
        """Remove an object."""
        self._client().rm_file(f"{BUCKET}/{path}")

    def names(self) -> list[str]:
        """Return the names of all objects."""
        return sorted(name.removeprefix(f"{BUCKET}/") for name in self._client().find(BUCKET))

    def _client(self) -> Any:
        key, secret = ADMIN["AWS_ACCESS_KEY_ID"], ADMIN["AWS_SECRET_ACCESS_KEY"]
        return fsspec.filesystem("s3", key=key, secret=secret, endpoint_url=self.url, use_listings_cache=False)

    def close(self) -> None:
        """Stop the server."""
        self.process.kill()
        self.process.wait()


@contextmanager
def erring_server(status: int, code: str) -> Iterator[str]:
    """Yield the URL of a scripted S3 server that answers every write with an error, and every read with 404."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # clients wait for 100 Continue

        def _answer(self, status: int, code: str) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            self.send_response(status)
            self.send_header("content-type", "application/xml")
            self.send_header("content-length", str(len(body)))
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            self._answer(404, "NoSuchKey")

        def do_PUT(self) -> None:
            self._answer(status, code)

        do_HEAD = do_GET
        do_POST = do_PUT

        def log_message(self, format: str, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
