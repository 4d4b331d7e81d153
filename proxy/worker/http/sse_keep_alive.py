"""Comments in a stream that is silent, so that nothing between here and the client takes it for dead.

Before the first words the response's head has to go out with the first comment, as a 200: what goes wrong after that
is told as an error event. So the first comment comes only after a whole pause. Between whole events a comment may
stand anywhere; clients skip it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Send

_COMMENT: Message = {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}


class SseKeepAlive:
    """Until it is stopped, `send` gets a comment after every `seconds` of silence.

    `head` returns the response's head where it has not been sent yet; `sent` is told when it has.
    """

    __slots__ = ("_head", "_loop", "_seconds", "_send", "_sent", "_task", "_timer", "heard")

    def __init__(
        self, send: Send, seconds: float, head: Callable[[], Message | None], sent: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._seconds = seconds
        self._head = head
        self._sent = sent
        self._task: asyncio.Task[None] | None = None
        self.heard = self._loop.time()  # when the client heard of us last
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(seconds, self._due)

    def spoke(self) -> None:
        """The client has heard of us now."""
        self.heard = self._loop.time()

    async def settle(self) -> None:
        """Wait until a comment that is on its way out, or its head, has gone."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    def stop(self) -> None:
        """No comment from here on."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._task is not None:
            self._task.cancel()

    def _due(self) -> None:
        left = self.heard + self._seconds - self._loop.time()
        if left > 0.001:
            self._timer = self._loop.call_later(left, self._due)
        else:
            self._task = self._loop.create_task(self._say())

    async def _say(self) -> None:
        head = self._head()
        if head is not None:
            await self._send(head)
            self._sent()
        await self._send(_COMMENT)
        self.spoke()
        if self._timer is not None:
            self._timer = self._loop.call_later(self._seconds, self._due)
