"""Notices that a client has left while its answer is still being made, and cancels the work for it at once.

The listening begins a moment after the call: a call that is quicker asks once, before it counts as answered (`check`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Receive

from ratchet.proxy.errors import ClientDisconnected

_SOON = 0.02  # seconds


class DisconnectWatch:
    """Inside the block, a disconnect cancels the block's task and sets `left`.

    The block catches the CancelledError: with `left` set it records what it has and calls `forgive`; otherwise the
    server itself wants the task to end.
    """

    __slots__ = ("_gone_already", "_listener", "_receive", "_task", "_timer", "left")

    def __init__(self, receive: Receive, gone: Callable[[], bool] | None = None) -> None:
        """`gone` says whether the client has left."""
        task = asyncio.current_task()
        assert task is not None, "only inside a task"
        self._task: asyncio.Task[None] | None = task
        self._receive = receive
        self._gone_already = gone
        self._listener: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(_SOON, self._listen)
        self.left = False

    def __enter__(self) -> DisconnectWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Raise ClientDisconnected where the client has left, although nobody has listened for it."""
        if self._gone_already is not None and self._gone_already():
            raise ClientDisconnected

    def stop(self) -> None:
        """From here on the client may leave unnoticed: the rest is ours to finish."""
        self._task = None
        self._timer.cancel()
        if self._listener is not None:
            self._listener.cancel()

    def forgive(self) -> None:
        """Take back the cancellation that the disconnect caused."""
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()

    def _listen(self) -> None:
        self._listener = asyncio.get_running_loop().create_task(_disconnect(self._receive))
        self._listener.add_done_callback(self._gone)

    def _gone(self, listener: asyncio.Task[None]) -> None:
        if self._task is not None and not listener.cancelled():
            self.left = True
            self._task.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
