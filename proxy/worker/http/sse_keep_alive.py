"""Sends SSE comments while a stream is silent, so that proxies and clients in between keep the connection open.

Before the first token, the response's head must go out with the first comment, as a 200; later failures become error
events. So the first comment is sent only after a full interval. A comment may come between any two events; clients
ignore it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Send

_COMMENT: Message = {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}


class SseKeepAlive:
    """Until `stop`, sends a comment after every `seconds` of silence.

    `stream_head` returns the response's head if it has not been sent yet; `on_head_sent` is called when it has.
    """

    __slots__ = ("_loop", "_on_head_sent", "_seconds", "_send", "_stream_head", "_task", "_timer", "last_sent_at")

    def __init__(
        self, send: Send, seconds: float, stream_head: Callable[[], Message | None], on_head_sent: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._seconds = seconds
        self._stream_head = stream_head
        self._on_head_sent = on_head_sent
        self._task: asyncio.Task[None] | None = None
        self.last_sent_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(seconds, self._on_timer)

    def mark_sent(self) -> None:
        """Record that bytes were sent to the client now."""
        self.last_sent_at = self._loop.time()

    async def wait_for_write(self) -> None:
        """Wait until a comment, or the head, that is being sent has gone out."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    def stop(self) -> None:
        """Send no more comments."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._task is not None:
            self._task.cancel()

    def _on_timer(self) -> None:
        left = self.last_sent_at + self._seconds - self._loop.time()
        if left > 0.001:
            self._timer = self._loop.call_later(left, self._on_timer)
        else:
            self._task = self._loop.create_task(self._send_comment())

    async def _send_comment(self) -> None:
        head = self._stream_head()
        if head is not None:
            await self._send(head)
            self._on_head_sent()
        await self._send(_COMMENT)
        self.mark_sent()
        if self._timer is not None:
            self._timer = self._loop.call_later(self._seconds, self._on_timer)
