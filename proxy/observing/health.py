"""GET /health/live, /health/ready, /health/backlog: for probes and for people. Never needs a key, never blocks."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from proxy.asgi import send_json
from proxy.errors import UpstreamError
from proxy.policy import PolicyBook
from proxy.recording.journal import Journal
from proxy.recording.shipper import Shipper
from proxy.upstreams.upstream import Upstream

_PATIENCE = 2.0  # seconds for a replica to answer a probe


class Health:
    """The three endpoints."""

    def __init__(self, book: PolicyBook, upstream: Upstream, journal: Journal, shipper: Shipper) -> None:
        self._book = book
        self._upstream = upstream
        self._journal = journal
        self._shipper = shipper

    async def live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 as long as the process answers."""
        await send_json(send, 200, {"status": "live"})

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 when a call would be served; 503 with what is missing."""
        answers = await asyncio.gather(*(self._probe(url) for url in self._upstream.urls))
        missing = [*self._book.readiness(), *(answer for answer in answers if answer)]
        await send_json(
            send, 503 if missing else 200, {"status": "not ready" if missing else "ready", "missing": missing}
        )

    async def backlog(self, scope: Scope, receive: Receive, send: Send) -> None:
        """How much of what was recorded is not in the store yet."""
        await send_json(send, 200, {"journal_bytes": self._journal.bytes, "unshipped_records": self._shipper.backlog})

    async def _probe(self, url: str) -> str | None:
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._upstream.models(url)
        except UpstreamError as error:
            return str(error)
        except TimeoutError:
            return f"upstream {url} does not answer within {_PATIENCE:g} s"
        return None
