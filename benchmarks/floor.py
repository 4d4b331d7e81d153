"""The floor to compare with: a raw ASGI application that passes chat calls on with aiohttp, and does nothing else.

No capture, no journal, no linking, no keys, no metrics: what a Python proxy on uvicorn and aiohttp costs before it does
anything of use. With FILE it writes request and answer there and syncs them before the last byte, a call at a time and
into blocks that exist: what the disk adds to any proxy that keeps an answered call.

    python -m benchmarks.floor PORT UPSTREAM_URL [FILE]
"""

from __future__ import annotations

import asyncio
import os
import sys

import aiohttp
import uvicorn
from starlette.types import Receive, Scope, Send

_FILE_BYTES = 64 * 2**20


class SyncedFile:
    """A file of fixed size that is overwritten from its beginning when it is full."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        for _ in range(_FILE_BYTES // 2**20):
            os.write(self._file, bytes(2**20))
        os.fsync(self._file)
        self._at = 0

    def write(self, data: bytes) -> None:
        """Write and sync; blocks."""
        at = self._at if self._at + len(data) <= _FILE_BYTES else 0
        self._at = at + len(data)
        os.pwrite(self._file, data, at)
        os.fdatasync(self._file)


class Floor:
    """The application."""

    def __init__(self, upstream: str, file: SyncedFile | None) -> None:
        self._url = upstream + "/v1/chat/completions"
        self._file = file
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
            )
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as answer:
            kept = [(b"content-type", answer.headers["content-type"].encode())]
            if "content-length" in answer.headers:
                kept.append((b"content-length", answer.headers["content-length"].encode()))
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            last = b""
            if self._file is not None:
                last = await answer.read()
                await asyncio.to_thread(self._file.write, body + last)
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": last})


if __name__ == "__main__":
    floor = Floor(sys.argv[2], SyncedFile(sys.argv[3]) if sys.argv[3:] else None)
    uvicorn.run(
        floor, port=int(sys.argv[1]), loop="uvloop", http="httptools", ws="none", log_config=None, access_log=False
    )
