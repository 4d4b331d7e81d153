"""The floor to compare with: a raw ASGI application that passes chat calls on with aiohttp, and does nothing else.

No capture, no journal, no linking, no keys, no metrics: what a Python proxy on uvicorn and aiohttp costs before it does
anything of use.

    python -m benchmarks.floor PORT UPSTREAM_URL
"""

from __future__ import annotations

import sys

import aiohttp
import uvicorn
from starlette.types import Receive, Scope, Send


class Floor:
    """The application."""

    def __init__(self, upstream: str) -> None:
        self._url = upstream + "/v1/chat/completions"
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
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    uvicorn.run(
        Floor(sys.argv[2]), port=int(sys.argv[1]), loop="uvloop", http="httptools", ws="none", log_config=None,
        access_log=False,
    )  # fmt: skip
